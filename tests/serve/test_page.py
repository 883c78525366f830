"""The page in a real browser: photos in, results and attention shown, errors in words, wide and narrow."""

import base64
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from serve.serving import running
from small_weights import TASKS, pixels, weights

from pale.predict import Predictor
from pale.serve import Limits, Models

CHROMIUM = next(
    (p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(p).exists()), None
)
if CHROMIUM is None:
    pytest.skip("no Chromium in /usr/bin; apt-get install chromium", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="pages are tested with playwright")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
READY = "body[data-state=ready]"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    return weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def server(made):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    models = Models(list(made.values()), device="cpu", score=0.05)
    models.warm_up()
    with running(models, Limits(wait_ms=0, max_upload_mb=2)) as found:
        yield found
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as tool:
        found = tool.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def photo(tmp_path_factory) -> Path:
    """Turned by EXIF: 60 wide and 91 high for whoever looks at it."""
    path = tmp_path_factory.mktemp("photos") / "turned.jpg"
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(pixels(91, 60)).save(path, exif=exif, quality=95)
    return path


@pytest.fixture
def page(request, browser, server):
    """A page that was opened; at the end nothing must have gone wrong in it."""
    options = getattr(request, "param", {"viewport": {"width": 1200, "height": 800}})
    context = browser.new_context(**options)
    found = context.new_page()
    found.set_default_timeout(60_000)
    wrong, asked = [], []
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    found.on("request", lambda r: asked.append(r.url))
    found.wrong = wrong
    found.goto(server.url)
    found.wait_for_selector(READY)
    yield found
    context.close()
    assert wrong == []
    assert all(u.startswith((server.url, "blob:", "data:")) for u in asked)


def shown(page, task: str, file: Path | None = None) -> None:
    """Choose a task, and a photo or the example; wait for the result and for what is behind it."""
    page.click(f"#tasks button[data-value={task}]")
    if file is None:
        page.click("#example >> visible=true") if page.is_visible("#example") else None
    else:
        page.set_input_files("#file", file)
    page.wait_for_selector("#strip button[data-view='3']")
    page.wait_for_selector(READY)
    settle(page)


def settle(page) -> None:
    page.evaluate("() => new Promise(f => requestAnimationFrame(() => requestAnimationFrame(f)))")


def facts(page) -> dict[str, str]:
    settle(page)
    return dict(
        zip(
            page.locator("#facts dt").all_inner_texts(),
            page.locator("#facts dd").all_inner_texts(),
            strict=True,
        )
    )


def canvas(page, which: str = "#main") -> np.ndarray:
    """The pixels of a canvas, (h, w, 4)."""
    code = """q => {
      const c = document.querySelector(q), copy = new OffscreenCanvas(c.width, c.height);
      const g = copy.getContext("2d", { willReadFrequently: true });
      g.drawImage(c, 0, 0);
      const d = g.getImageData(0, 0, c.width, c.height).data;
      let s = "";
      for (let i = 0; i < d.length; i += 8192) s += String.fromCharCode(...d.subarray(i, i + 8192));
      return [c.height, c.width, btoa(s)]; }"""
    h, w, data = page.evaluate(code, which)
    return np.frombuffer(base64.b64decode(data), np.uint8).reshape(h, w, 4)


def test_the_example_is_classified_and_looked_into(page, made, server):
    assert page.is_visible("#empty")
    assert not page.is_visible("#resultcard")
    assert page.locator("#tasks button").all_inner_texts() == ["Classify", "Segment", "Detect"]
    page.click("#example")
    page.wait_for_selector("#strip button[data-view='3']")
    page.wait_for_selector(READY)
    said = Predictor(made["classification"], device="cpu")(server.client.get("/example").content)
    rows = page.locator("#result .name").all_inner_texts()
    assert [re.split(r"\n", row)[0] for row in rows] == list(said.scores)
    assert f"{100 * said.scores[said.best]:.1f} %" in rows[0]
    assert said.best in page.inner_text("#said")
    assert page.locator("#result .fill").first.evaluate("e => e.getBoundingClientRect().width") > 20


def test_a_hovered_point_shows_its_pale_and_attention_in_each_stage(page, photo, server):
    shown(page, "segmentation", photo)
    plain = canvas(page)
    page.hover("#main", position={"x": 30, "y": 40})
    here = facts(page)
    assert here["class here"].startswith("segmentation ")
    strips = {s: canvas(page, f"#strip button[data-view='{s}'] canvas") for s in range(4)}
    page.hover("#main", position={"x": 200, "y": 300})
    for s, before in strips.items():
        after = canvas(page, f"#strip button[data-view='{s}'] canvas")
        assert not np.array_equal(before, after), s
    page.click("#strip button[data-view='0']")
    page.hover("#main", position={"x": 200, "y": 300})
    there = facts(page)
    assert there["weights sum to"] == "1.0000"
    assert there["point"] != here["point"]
    assert not np.array_equal(canvas(page), plain)
    # What the server says about the same point.
    box = page.locator("#main").bounding_box()
    x, y = 60 * 200 / box["width"], 91 * 300 / box["height"]
    assert there["point"] == f"{int(x)}, {int(y)}"
    told = page.request.post(
        f"{server.url}/look?task=segmentation&x={x}&y={y}", data=photo.read_bytes()
    ).json()
    stage = told["stages"][0]
    assert there["token"] == f"row {stage['token'][0]}, column {stage['token'][1]}"
    count = sum(bits > 0 for row in stage["pale"] for bits in row)
    total = stage["map"][0] * stage["map"][1]
    assert there["its pale"].replace(",", "") == f"{count} of {total} tokens"
    top = max(max(row) for row in stage["attention"])
    assert float(there["largest"].split()[0]) == pytest.approx(100 * top, rel=0.01)
    page.click("#modes button[data-value=pale]")
    assert "weights sum to" not in facts(page)
    assert page.locator("#legend").inner_text().split() == ["rows", "columns", "both"]


def test_colours_follow_the_slider(page, made, photo):
    shown(page, "segmentation", photo)
    said = Predictor(made["segmentation"], device="cpu")(photo)
    rows = [row.split("\n")[0] for row in page.locator("#result .name").all_inner_texts()]
    assert rows == list(said.shares)
    pictures = {}
    for value in (0, 100):
        page.locator("#opacity").fill(str(value))
        settle(page)
        assert page.inner_text("#opacityshown") == f"{value} %"
        pictures[value] = canvas(page)
    assert pictures[0].shape[0] > pictures[0].shape[1]  # turned as EXIF says
    h, w = pictures[100].shape[:2]
    for y, x in ((0.2, 0.3), (0.7, 0.6), (0.9, 0.1)):
        label = said.labels[int(y * 91), int(x * 60)]
        found = pictures[100][int(y * h), int(x * w), :3]
        assert tuple(found) == said.colours[label]
    assert np.abs(pictures[0].astype(int) - pictures[100]).mean() > 5


def test_objects_are_drawn_listed_and_chosen_by_score(page, made, photo):
    shown(page, "detection", photo)
    said = Predictor(made["detection"], device="cpu", score=0.05)(photo)
    rows = page.locator("#result li").all_inner_texts()
    assert len(rows) == len(said.objects) > 0
    score = f"{said.objects[0]['score']:.2f}"
    assert rows[0].replace("\n", " ").split() == [
        *said.plain()["objects"][0]["class"].split(),
        score,
    ]
    drawn = canvas(page)
    page.locator("#score").fill("1")
    settle(page)
    assert "Nothing was found" in page.inner_text("#result")
    assert page.inner_text("#scoreshown") == "1.00"
    assert not np.array_equal(canvas(page), drawn)


def test_keys_move_the_point_by_a_token(page, photo):
    shown(page, "classification", photo)
    page.click("#strip button[data-view='1']")
    page.focus("#photo")
    start = facts(page)["token"]
    page.keyboard.press("ArrowLeft")
    row, column = (int(n) for n in re.findall(r"\d+", start))
    assert facts(page)["token"] == f"row {row}, column {column - 1}"
    page.keyboard.press("ArrowDown")
    assert facts(page)["token"] == f"row {row + 1}, column {column - 1}"
    assert "Pinned" in page.inner_text("#hint")
    for _ in range(40):
        page.keyboard.press("ArrowUp")
    assert facts(page)["token"].startswith("row 0,")


def test_all_can_be_done_with_the_keyboard(page):
    reached = set()
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.dataset.value")
        )
    assert {"choose", "example", *TASKS} <= reached
    page.focus("#example")
    page.keyboard.press("Enter")
    page.wait_for_selector("#strip button[data-view='3']")


def test_what_is_no_picture_is_told_in_words_and_the_last_photo_stays(page, photo, tmp_path):
    bad = tmp_path / "notes.txt"
    bad.write_text("just words")
    page.set_input_files("#file", bad)
    page.wait_for_selector("#error:not(.hidden)")
    assert "This is no picture that can be read" in page.inner_text("#error")
    assert page.is_visible("#empty")
    shown(page, "classification", photo)
    assert not page.is_visible("#error")
    before = canvas(page)
    page.set_input_files("#file", bad)
    page.wait_for_selector("#error:not(.hidden)")
    page.wait_for_selector(READY)
    settle(page)
    assert np.array_equal(canvas(page), before)
    large = tmp_path / "large.bmp"
    large.write_bytes(bytes(2_100_000))
    page.set_input_files("#file", large)
    page.wait_for_function("document.querySelector('#wrong').textContent.includes('2.1')")
    page.click("#dismiss")
    assert not page.is_visible("#error")
    # The browser itself notes an answer that is an error.
    assert len(page.wrong) == 2
    assert all("415" in text for text in page.wrong)
    page.wrong.clear()


def test_a_kind_of_file_that_the_browser_cannot_show_is_shown_by_the_server(page, tmp_path):
    path = tmp_path / "scan.tiff"
    Image.fromarray(pixels(80, 50)).save(path)
    shown(page, "classification", path)
    assert not page.is_visible("#error")
    picture = canvas(page)
    assert picture.shape[1] / picture.shape[0] == pytest.approx(80 / 50, rel=0.02)


def test_a_photo_can_be_pasted_and_dropped(page, photo):
    code = """([type, name, data]) => {
      const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0)), box = new DataTransfer();
      box.items.add(new File([bytes], name, { type: "image/jpeg" }));
      const event = type === "paste" ? new ClipboardEvent(type, { clipboardData: box, bubbles: true, cancelable: true })
        : new DragEvent(type, { dataTransfer: box, bubbles: true, cancelable: true });
      document.body.dispatchEvent(event); }"""
    data = base64.b64encode(photo.read_bytes()).decode()
    page.evaluate(code, ["paste", "p.jpg", data])
    page.wait_for_selector("#strip button[data-view='3']")
    page.wait_for_selector(READY)
    page.evaluate(code, ["dragenter", "p.jpg", data])
    assert page.is_visible("#over")
    page.evaluate(code, ["drop", "p.jpg", data])
    assert not page.is_visible("#over")
    page.wait_for_selector("body[data-state=busy], body[data-state=ready]")
    page.wait_for_selector(READY)
    assert "60 x 91" in page.inner_text("#result")


PHONE = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "color_scheme": "dark"}


@pytest.mark.parametrize("page", [PHONE], indirect=True, ids=["360"])
def test_a_narrow_phone_shows_all_of_it(page, photo, server):
    for task in TASKS:
        shown(page, task, photo)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        for which in ("#main", "#resultcard", "#lookcard", "#tasks"):
            box = page.locator(which).bounding_box()
            assert box["x"] >= 0, which
            assert box["x"] + box["width"] <= 360, which
    assert page.locator("#taskcard").bounding_box()["y"] < page.locator("#main").bounding_box()["y"]
    page.tap("#strip button[data-view='2']")
    before = facts(page)
    page.locator("#main").tap(position={"x": 20, "y": 30})
    assert facts(page)["token"] != before["token"]
    red, green, blue = (
        int(v)
        for v in re.findall(
            r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor")
        )[:3]
    )
    assert max(red, green, blue) < 60  # dark
    page.goto(f"{server.url}/docs")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
