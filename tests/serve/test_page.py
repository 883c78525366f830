"""The page in a real browser: photos in, results and attention shown, errors shown, wide and narrow."""

import base64
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serve.serving import running
from support.weights import TASKS, pixels, weights

from pale.predict import Predictor
from pale.serve import Limits, Models

READY = "body[data-state=ready]"


@pytest.fixture(scope="module")
def server(made, one_thread):
    models = Models(list(made.values()), device="cpu", score=0.05)
    models.warm_up()
    with running(models, Limits(wait_ms=0, max_upload_mb=2)) as found:
        yield found


@pytest.fixture(scope="module")
def photo(tmp_path_factory) -> Path:
    """A photo that EXIF rotates: it is shown 60 wide and 91 high."""
    path = tmp_path_factory.mktemp("photos") / "turned.jpg"
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(pixels(91, 60)).save(path, exif=exif, quality=95)
    return path


@pytest.fixture
def page(request, browser, server):
    """An open page; at the end it must have had no error, and no request to another site."""
    options = getattr(request, "param", {"viewport": {"width": 1200, "height": 800}})
    context = browser.new_context(**options)
    found = context.new_page()
    found.set_default_timeout(60_000)
    wrong, urls = [], []
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    found.on("request", lambda r: urls.append(r.url))
    found.wrong = wrong
    found.goto(server.url)
    found.wait_for_selector(READY)
    yield found
    context.close()
    assert wrong == []
    assert all(u.startswith((server.url, "blob:", "data:")) for u in urls)


def shown(page, task: str, file: Path | None = None) -> None:
    """Choose a task, and a photo or the example; wait for the result and the attention."""
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
    """Return the pixels of a canvas, (h, w, 4)."""
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


def test_the_example_is_classified_and_its_attention_shown(page, made, server):
    assert page.is_visible("#empty")
    assert not page.is_visible("#resultcard")
    assert page.locator("#tasks button").all_inner_texts() == ["Classify", "Segment", "Detect"]
    page.click("#example")
    page.wait_for_selector("#strip button[data-view='3']")
    page.wait_for_selector(READY)
    result = Predictor(made["classification"], device="cpu")(server.client.get("/example").content)
    rows = page.locator("#result .name").all_inner_texts()
    assert [re.split(r"\n", row)[0] for row in rows] == list(result.scores)
    assert f"{100 * result.scores[result.best]:.1f} %" in rows[0]
    assert result.best in page.inner_text("#said")  # kept name
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
    # The response of the server about the same point.
    box = page.locator("#main").bounding_box()
    x, y = 60 * 200 / box["width"], 91 * 300 / box["height"]
    assert there["point"] == f"{int(x)}, {int(y)}"
    response = page.request.post(
        f"{server.url}/look?task=segmentation&x={x}&y={y}", data=photo.read_bytes()
    ).json()
    stage = response["stages"][0]
    assert there["token"] == f"row {stage['token'][0]}, column {stage['token'][1]}"
    count = sum(bits > 0 for row in stage["pale"] for bits in row)
    total = stage["map"][0] * stage["map"][1]
    assert there["pale"].replace(",", "") == f"{count} of {total} tokens"
    top = max(max(row) for row in stage["attention"])
    assert float(there["maximum"].split()[0]) == pytest.approx(100 * top, rel=0.01)
    page.click("#modes button[data-value=pale]")
    assert "weights sum to" not in facts(page)
    assert page.locator("#legend").inner_text().split() == ["rows", "columns", "both"]


def test_colours_follow_the_slider(page, made, photo):
    shown(page, "segmentation", photo)
    result = Predictor(made["segmentation"], device="cpu")(photo)
    rows = [row.split("\n")[0] for row in page.locator("#result .name").all_inner_texts()]
    assert rows == list(result.shares)
    canvases = {}
    for value in (0, 100):
        page.locator("#opacity").fill(str(value))
        settle(page)
        assert page.inner_text("#opacityshown") == f"{value} %"
        canvases[value] = canvas(page)
    assert canvases[0].shape[0] > canvases[0].shape[1]  # rotated by EXIF
    h, w = canvases[100].shape[:2]
    for y, x in ((0.2, 0.3), (0.7, 0.6), (0.9, 0.1)):
        label = result.labels[int(y * 91), int(x * 60)]
        found = canvases[100][int(y * h), int(x * w), :3]
        assert tuple(found) == result.colours[label]
    assert np.abs(canvases[0].astype(int) - canvases[100]).mean() > 5


def test_objects_are_drawn_listed_and_chosen_by_score(page, made, photo):
    shown(page, "detection", photo)
    result = Predictor(made["detection"], device="cpu", score=0.05)(photo)
    rows = page.locator("#result li").all_inner_texts()
    assert len(rows) == len(result.objects) > 0
    score = f"{result.objects[0]['score']:.2f}"
    assert rows[0].replace("\n", " ").split() == [
        *result.plain()["objects"][0]["class"].split(),
        score,
    ]
    drawn = canvas(page)
    page.locator("#score").fill("1")
    settle(page)
    certain = sum(found["score"] >= 1 for found in result.objects)  # weights are random
    assert page.locator("#result li").count() == certain < len(result.objects)
    assert ("No objects found" in page.inner_text("#result")) == (not certain)
    assert page.inner_text("#scoreshown") == "1.00"
    assert not np.array_equal(canvas(page), drawn)


def test_the_slider_of_scores_reaches_below_the_threshold_of_the_server(browser, made, photo):
    found = Predictor(made["detection"], device="cpu", score=0.05)(photo).objects
    strict = Models([made["detection"]], device="cpu", score=1.0)
    with running(strict, Limits(wait_ms=0)) as server:
        page = browser.new_page()
        page.goto(server.url)
        shown(page, "detection", photo)
        assert page.locator("#result li").count() < len(found)
        assert page.locator("#score").get_attribute("min") == "0.05"
        assert page.locator("#score").input_value() == "1"
        assert "minimum score" in page.inner_text("#scorecard").lower()
        page.locator("#score").fill("0.05")
        settle(page)
        assert page.locator("#result li").count() == len(found)
        page.close()


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


def test_the_page_works_with_the_keyboard(page):
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


def test_a_file_that_is_not_an_image_gives_an_error_and_the_last_photo_stays(page, photo, tmp_path):
    bad = tmp_path / "notes.txt"
    bad.write_text("just words")
    page.set_input_files("#file", bad)
    page.wait_for_selector("#error:not(.hidden)")
    assert "The file is not an image in a supported format" in page.inner_text("#error")
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
    # The browser logs each response that is an error.
    assert len(page.wrong) == 2
    assert all("415" in text for text in page.wrong)
    page.wrong.clear()


def test_a_format_that_the_browser_cannot_read_is_converted_by_the_server(page, tmp_path):
    path = tmp_path / "scan.tiff"
    Image.fromarray(pixels(80, 50)).save(path)
    shown(page, "classification", path)
    assert not page.is_visible("#error")
    shown_pixels = canvas(page)
    assert shown_pixels.shape[1] / shown_pixels.shape[0] == pytest.approx(80 / 50, rel=0.02)


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


HOSTILE = "<img src=x onerror='document.title=`owned`'><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A server with hostile names of classes and models; it needs a token."""
    folder = tmp_path_factory.mktemp("hostile")
    made = weights(folder)
    models = Models(list(made.values()), device="cpu", score=0.05)
    for predictor in models.predictors.values():
        loaded = predictor.loaded
        names = tuple(f"{HOSTILE}{i}" for i in range(len(predictor.classes)))
        predictor.classes = list(names)
        predictor.loaded = replace(
            loaded, name=HOSTILE, pipeline=replace(loaded.pipeline, classes=names)
        )
    with running(models, Limits(wait_ms=0, max_upload_mb=2), token=TOKEN) as found:
        yield found


TOKEN = "a-token-of-enough-characters"


@pytest.fixture
def visit(browser, hostile):
    context = browser.new_context()
    page = context.new_page()
    page.violations = []
    page.on("console", lambda message: page.violations.append(message.text))
    page.goto(hostile.url)
    yield page
    context.close()


def enter(page, token: str) -> None:
    page.wait_for_selector("#tokencard:not(.hidden)")
    page.fill("#token", token)
    page.keyboard.press("Enter")


def test_the_page_asks_for_a_token_and_keeps_it_for_the_tab(visit, photo):
    enter(visit, "wrong-token-of-enough-characters")
    visit.wait_for_selector("#error:not(.hidden)")
    assert "needs a token" in visit.inner_text("#error")
    enter(visit, TOKEN)
    visit.wait_for_selector(READY)
    assert not visit.is_visible("#tokencard")
    assert not visit.is_visible("#error")
    shown(visit, "classification", photo)
    assert visit.locator("#result .name").count() == 5
    visit.reload()
    visit.wait_for_selector(READY)
    assert not visit.is_visible("#tokencard")
    assert visit.evaluate("localStorage.length") == 0
    assert visit.evaluate("document.cookie") == ""


def test_names_from_files_are_shown_and_never_run(visit, photo, tmp_path):
    enter(visit, TOKEN)
    visit.wait_for_selector(READY)
    named = tmp_path / "<img src=x onerror=alert(1)>.jpg"
    named.write_bytes(photo.read_bytes())
    for task in TASKS:
        shown(visit, task, named)
        assert HOSTILE in visit.inner_text("#result")
        assert HOSTILE in visit.inner_text("#model")
    assert visit.title() == "pale"
    assert visit.locator("main img, main script").count() == 0


def test_the_policy_forbids_inline_scripts_and_strings_as_html(visit):
    for page in ("/", "/docs"):
        visit.goto(visit.url.split("/docs")[0].rstrip("/") + page)
        code = """() => { const s = document.createElement("script"), out = [];
          try { s.text = "document.title = 'owned'"; document.body.append(s); } catch (e) { out.push(e.name); }
          try { document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='document.title=`owned`'>"); }
          catch (e) { out.push(e.name); }
          return out; }"""
        assert visit.evaluate(code) == ["TypeError", "TypeError"]
        visit.wait_for_timeout(100)
        assert visit.title() != "owned"
        meta = visit.get_attribute("meta[http-equiv='Content-Security-Policy']", "content")
        assert "default-src 'none'" in meta
        assert "unsafe" not in meta
