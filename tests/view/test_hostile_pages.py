"""Pages that the package writes, opened in a browser: their own scripts run, text from files never does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from support.recipes import classification_recipe
from support.weights import weights

from pale.train.report import write, write_comparison
from pale.view import demo
from pale.view.attention import trace_attention
from pale.view.page import save
from pale.weights import zoo
from pale.weights.write import save_weights

# Each sets window.owned or leaves the page when it runs, in an element, an attribute, a title, JSON or a script.
ATTACKS = [
    "<script>window.owned = 1</script>",
    "<img src=x onerror='window.owned = 1'>",
    "' onmouseover='window.owned = 1' autofocus onfocus='window.owned = 1' x='",
    '" onload="window.owned = 1" x="',
    "</title></style></pre></svg><svg onload='window.owned = 1'>",
    "</script><script>window.owned = 1</script>",
    "__DATA__ __CORE__ __POLICY__ ${window.owned = 1}",
    "<meta http-equiv=refresh content='0;url=data:text/html,owned'>",
    "<base href='https://owned.invalid/'><form action=x><input>",
    "javascript:window.owned=1",
]
ATTACK = " ".join(ATTACKS)
FOREIGN = (
    "img:not([src^='data:']), iframe, object, embed, base, form, link, svg[onload], *[onmouseover]"
)


def visited(browser: Any, path: Path) -> Any:
    """Open the page and point at every element; no foreign script may have run and no request been sent."""
    page = browser.new_page()
    urls: list[str] = []
    refused: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.on("console", lambda entry: refused.append(entry.text) if entry.type == "error" else None)
    page.on("pageerror", lambda error: refused.append(str(error)))
    page.goto(path.as_uri(), wait_until="load")
    page.evaluate(
        "document.querySelectorAll('*').forEach(e => e.dispatchEvent(new Event('mouseover')))"
    )
    page.wait_for_timeout(200)
    assert page.url == path.as_uri()
    assert page.evaluate("window.owned") is None
    assert [url for url in urls if not url.startswith("data:")] == [path.as_uri()]
    assert refused == []
    assert page.locator(FOREIGN).count() == 0
    assert page.locator("meta[http-equiv='Content-Security-Policy']").count() == 1
    return page


def locked(browser: Any, path: Path, own: int) -> None:
    """Check that a script that was inserted into the page does not run."""
    text = path.read_text(encoding="utf-8")
    assert text.count("<script>") == own
    at = text.index("</title>") + len("</title>")
    broken = path.with_name("broken.html")
    broken.write_text(text[:at] + "<script>window.owned = 1</script>" + text[at:], encoding="utf-8")
    page = browser.new_page()
    page.goto(broken.as_uri(), wait_until="load")
    assert page.evaluate("window.owned") is None
    page.close()


def hostile_run(folder: Path) -> Path:
    """A run whose every text is an attack."""
    recipe = classification_recipe(name=ATTACK, about=ATTACK)
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.plain()))
    step = {"event": "step", "step": 1, "loss": 1.0, "lr": 0.1, "images_per_s": 9.0}
    events = [
        {"event": "start", "steps": ATTACK, "device": ATTACK, ATTACK: ATTACK},
        step | {"data_wait": 0.1},
        step | {"step": ATTACK, "loss": ATTACK},
        {"event": "eval", "step": 1, "top1": 3.0, ATTACK: ATTACK},
        # Metrics under hostile names, in groups too; notes, and a stop without a valid signal.
        {"event": "eval", "step": 2, "top1": 4.0, ATTACK: 1.5, "group": {ATTACK: {ATTACK: 2.5}}},
        {"event": "eval", "step": 3, "top1": 5.0, ATTACK: 2.5, "group": {ATTACK: {ATTACK: 3.5}}},
        step | {"step": 2, ATTACK: 1.0},
        step | {"step": 3, ATTACK: 2.0},
        {"event": "note", "text": ATTACK},
        {"event": "skipped", "message": ATTACK},
        {"event": "stop", "signal": ATTACK, "step": ATTACK},
        {"event": ATTACK},
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    classes = [ATTACK, *(f"{attack} {i}" for i, attack in enumerate(ATTACKS[:7]))]
    about = {
        "classes": classes,
        "confusion": [[i + j for j in range(8)] for i in range(8)],
        "mistakes": [[1.5, 0, 0, 1]],
        "confident_mistakes": [[0.9, 0, 0, 1]],
        "confident_hits": [[0.9, 0, 2, 2]],
        "per_class": [{"class": ATTACK, ATTACK: 1.0, "images": 3, "note": ATTACK}],
    }
    (folder / "evaluation.json").write_text(json.dumps(about))
    return folder


def test_the_report_of_a_hostile_run_is_text(browser: Any, tmp_path: Path) -> None:
    path = write(hostile_run(tmp_path / "<script>window.owned = 1<"))
    page = visited(browser, path)
    assert page.title().startswith("<script>window.owned")
    assert page.locator("h1").inner_text().startswith("<script>window.owned")
    assert page.locator("table.matrix tr > td").count() == 64 + 1
    assert page.locator("text=group.<script>").count() > 0
    # The buttons that choose a table work without scripts.
    labels = page.locator(".sorted > label")
    for i in range(labels.count()):
        labels.nth(i).click()
        assert page.locator(".pane:visible").count() == 1
    page.close()
    locked(browser, path, own=0)


def test_the_comparison_of_hostile_runs_is_text(browser: Any, tmp_path: Path) -> None:
    runs = [hostile_run(tmp_path / name / "<script>window.owned = 1<") for name in "ab"]
    runs.append(hostile_run(tmp_path / "<img src=x onerror='window.owned = 1'>"))
    path = write_comparison(runs, tmp_path / "page.html")
    page = visited(browser, path)
    assert page.locator("h1").inner_text() == "3 runs compared"
    assert page.locator("text=<script>window.owned").count() > 0
    page.close()
    locked(browser, path, own=0)


def quiet_run(folder: Path, steps: int) -> Path:
    """A long run of many classes with long names."""
    recipe = classification_recipe(name="a.recipe.with.a.long.name." * 5, data__root="/a/b" * 60)
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.plain()))
    events: list[dict[str, Any]] = [{"event": "start", "steps": steps, "device": "long" * 60}]
    for i in range(steps):
        values = {"loss": 1 / (i + 1), "lr": 1e-5 * i, "images_per_s": 14_000.0 + i % 7}
        events.append({"event": "step", "step": 1000 * i, "epoch": i / 9} | values)
        if i % 10 == 0:
            events.append(
                {"event": "eval", "step": 1000 * i, "top1": i / steps, "images": 50_000.0}
            )
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    names = [f"{'class with a long name ' * 4}{i}" for i in range(39)] + ["x" * 300]
    about = {
        "classes": names,
        "confusion": [[(i * j) % 977 for j in range(40)] for i in range(40)],
        "confident_mistakes": [[0.9, i, i, i + 1] for i in range(12)],
        "confident_hits": [[0.99, i, i, i] for i in range(12)],
        "per_class": [{"class": n, "images": 9, "accuracy": 50.0, "precision": 3.0} for n in names],
    }
    (folder / "evaluation.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_no_page_is_wider_than_the_screen(
    width: int, scheme: str, browser: Any, tmp_path: Path
) -> None:
    runs = [quiet_run(tmp_path / ("long_name_" * 12 + str(i)), 60) for i in range(3)]
    for path in (write(runs[0]), write_comparison(runs, tmp_path / "page.html")):
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.goto(path.as_uri(), wait_until="load")
        for details in page.locator("details").all():
            details.evaluate("each => each.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator("svg").first.bounding_box()["width"] <= width
        page.close()


@pytest.mark.parametrize("field", ["steps", "count"])
def test_a_field_that_should_be_a_number_runs_nothing(
    field: str, browser: Any, tmp_path: Path
) -> None:
    run = hostile_run(tmp_path / "run")
    evil = "<script>window.owned = 1</script>"
    if field == "steps":
        event = {"event": "start", "steps": evil}
        (run / "log.jsonl").write_text(json.dumps(event) + "\n")
    else:
        about = {"classes": ["a", "b"], "confusion": [[1, evil], [0, 1]]}
        (run / "evaluation.json").write_text(json.dumps(about))
        with pytest.raises(ValueError, match="was not written by an evaluation"):
            write(run)
        return
    visited(browser, write(run)).close()


def test_the_attention_page_of_hostile_names_works_and_runs_its_own_script_alone(
    browser: Any, tmp_path: Path
) -> None:
    recipe = classification_recipe()
    model = recipe.model.build(len(ATTACKS), recipe.data.size)
    file = tmp_path / "hostile.safetensors"
    about = {"recipe": recipe.plain(), "classes": ATTACKS}
    save_weights(file, model.state_dict(), about)
    one = trace_attention(Image.new("RGB", (40, 30), (90, 60, 30)), file, size=32)
    path = save(one, tmp_path / "page.html", title=ATTACK)
    page = visited(browser, path)
    page.wait_for_selector("body[data-ready=yes]", timeout=20_000)
    page.locator("#modes button[data-value=cam]").click()
    names = page.locator("#class option").all_inner_texts()
    assert len(names) == 6
    assert page.locator("#facts").inner_text()
    assert page.evaluate("window.owned") is None
    assert ATTACKS[0] in page.locator("#about").inner_text()
    page.close()
    locked(browser, path, own=2)


@pytest.mark.slow
def test_the_demo_with_hostile_weights_and_a_hostile_run_is_text(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "zoo"
    folder.mkdir()
    path = weights(folder)["classification"]
    named = {"name": "small", "task": "classification", "model": ATTACK, "file": path.name}
    numbers = {"bytes": path.stat().st_size, "sha256": zoo.file_sha256(path), "params": 12_345}
    entry = zoo.ZooEntry(
        **named, card="none.md", **numbers, classes=9, figures={"top1": 5.0}, data=ATTACK
    )
    zoo.write_index([entry], folder)
    monkeypatch.setattr(zoo.index, "FOLDER", folder)
    output = tmp_path / "demo"
    run = hostile_run(output / "javascript:window.owned=1;'><img src=x onerror='window.owned = 1'>")
    write(run)
    path = demo.write(output, run=run)
    page = visited(browser, path)
    with page.expect_navigation():
        page.locator("a", has_text="Its report").click()
    assert page.locator("h1").inner_text().startswith("<script>window.owned")
    assert page.evaluate("window.owned") is None
    page.close()
    locked(browser, path, own=0)
    page = visited(browser, output / "attention.html")
    page.wait_for_selector("body[data-ready=yes]", timeout=20_000)
    page.close()
