"""Predictions as annotations: written, then read back by our readers and by pycocotools."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.predictions import (
    CLASSES,
    SIZE,
    classified,
    detected,
    nothing,
    segmented,
    shapes,
    written,
)

from pale.cli.main import main
from pale.data import rle
from pale.data.sources.coco import CocoFiles
from pale.data.sources.label_formats import read_labels
from pale.data.sources.yolo import YoloMasks
from pale.errors import DataError, SettingsError
from pale.predict.annotations import CocoWriter, LabelStudioWriter, YoloWriter, encode_brush

ROOT = Path("photos")


def save_images(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", SIZE[::-1]).save(folder / name)


def decode_brush(code: list[int]) -> np.ndarray:
    """Decode Label Studio's runs, as its frontend does."""
    bits = "".join(f"{byte:08b}" for byte in code)
    at = 0

    def read(count: int) -> int:
        nonlocal at
        at += count
        return int(bits[at - count : at], 2)

    total, word, sizes = read(32), read(5) + 1, [read(4) + 1 for _ in range(4)]
    values: list[int] = []
    while len(values) < total:
        run = read(1)
        count = 1 + read(sizes[read(2)])
        values += [read(word)] * count if run else [read(word) for _ in range(count)]
    return np.array(values, np.uint8)


@pytest.mark.parametrize("masks", [True, False], ids=["shapes", "boxes"])
def test_coco_is_read_back_with_the_same_boxes_shapes_and_classes(tmp_path, masks):
    written(
        CocoWriter(tmp_path, CLASSES, [ROOT]),
        detected("photos/deep/a.png", masks),
        nothing("photos/b.png"),
    )
    save_images(tmp_path, "deep/a.png", "b.png")
    found = CocoFiles(tmp_path / "coco.json", tmp_path)
    assert found.classes == list(CLASSES)
    assert found.shaped == masks
    own = found.instances(0)
    assert own.labels.tolist() == [0, 1, 2]
    boxes = [[x, y, x + w, y + h] for x, y, w, h in (e["bbox"] for e in detected("a").objects)]
    assert np.array_equal(own.boxes, boxes)
    if masks:
        assert np.array_equal(own.masks(), shapes())
        assert own.areas.tolist() == [mask.sum() for mask in shapes()]
    assert len(found.instances(1)) == 0
    assert found.image(0).size == SIZE[::-1]


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of pycocotools
def test_pycocotools_reads_the_same(tmp_path):
    from pycocotools.coco import COCO

    written(
        CocoWriter(tmp_path, CLASSES, [ROOT]), detected("photos/a.png"), segmented("photos/b.png")
    )
    theirs = COCO(str(tmp_path / "coco.json"))
    assert [c["name"] for c in theirs.loadCats(theirs.getCatIds())] == list(CLASSES)
    for identity, scores in ((1, [0.9, 0.8, 0.7]), (2, [None] * 3)):
        entries = theirs.loadAnns(theirs.getAnnIds(identity))
        assert [entry.get("score") for entry in entries] == pytest.approx(scores)
        masks = [theirs.annToMask(entry) for entry in entries]
        assert np.array_equal(masks, shapes())
        assert [entry["category_id"] for entry in entries] == [1, 2, 3]


@pytest.mark.parametrize("masks", [True, False], ids=["shapes", "boxes"])
def test_yolo_is_read_back_with_the_same_boxes_shapes_and_classes(tmp_path, masks):
    root = written(
        YoloWriter(tmp_path, CLASSES, [ROOT]),
        detected("photos/deep/a.png", masks),
        nothing("photos/b.png"),
    )
    save_images(root / "images", "deep/a.png", "b.png")
    assert (root / "labels/b.txt").read_text() == ""
    read = read_labels("yolo", root, "train").require_readable()
    found = CocoFiles(read.origin, read.folder, content=read.content)
    assert found.classes == list(CLASSES)
    assert [len(found.instances(i)) for i in range(2)] == [0, 3]
    own = found.instances(1)
    assert own.labels.tolist() == [0, 1, 2]
    if masks:
        assert np.array_equal(own.masks(), shapes())
    else:
        boxes = [[x, y, x + w, y + h] for x, y, w, h in (e["bbox"] for e in detected("a").objects)]
        assert own.boxes == pytest.approx(np.array(boxes), abs=1e-4)


def test_masks_of_a_segmenter_are_read_back_from_yolo(tmp_path):
    prediction = segmented("a.png")
    root = written(YoloWriter(tmp_path, prediction.classes), prediction)
    save_images(root / "images", "a.png")
    found = YoloMasks(root, "val")
    assert found.classes.names == list(prediction.classes)
    assert np.array_equal(found.mask(0), prediction.labels)


def test_two_images_with_one_label_file_are_an_error(tmp_path):
    writer = YoloWriter(tmp_path, CLASSES, [ROOT])
    writer.add(nothing("photos/a.png"))
    with pytest.raises(DataError, match=r"a\.jpg and another image have one label file"):
        writer.add(nothing("photos/a.jpg"))


@pytest.mark.parametrize("seed", range(5))
def test_brush_codes_hold_every_pixel(seed):
    rng = np.random.default_rng(seed)
    h, w = rng.integers(1, 200, 2)
    mask = np.zeros((h, w), np.uint8)
    mask[rng.integers(0, h) :, rng.integers(0, w) :] = seed != 4
    mask ^= (rng.random((h, w)) < 0.1 * (seed == 3)).astype(np.uint8)
    values = decode_brush(encode_brush(mask)).reshape(h, w, 4)
    assert np.array_equal(values, np.repeat(mask[..., None] * 255, 4, 2))


def test_tasks_of_label_studio_hold_boxes_shapes_and_choices(tmp_path):
    written(
        LabelStudioWriter(tmp_path, CLASSES, [ROOT], model="mine"),
        detected("photos/a b.png", masks=False),
        detected("photos/b.png"),
        classified("elsewhere/c.png"),
    )
    tasks = json.loads((tmp_path / "label_studio.json").read_text())
    assert [task["data"]["image"] for task in tasks] == [
        "/data/local-files/?d=a%20b.png",
        "/data/local-files/?d=b.png",
        "/data/local-files/?d=c.png",
    ]
    boxes, brushes, choices = (task["predictions"][0] for task in tasks)
    assert boxes["score"] == pytest.approx(0.8)
    assert boxes["model_version"] == "mine"
    for result, entry in zip(boxes["result"], detected("a").objects, strict=True):
        value = result["value"]
        left, top, w, h = (value[k] / 100 for k in ("x", "y", "width", "height"))
        assert [left * 60, top * 40, w * 60, h * 40] == pytest.approx(entry["bbox"])
    for result, mask, name in zip(brushes["result"], shapes(), CLASSES, strict=True):
        assert result["value"]["brushlabels"] == [name]
        decoded = decode_brush(result["value"]["rle"]).reshape(*SIZE, 4)
        assert np.array_equal(decoded[..., 3] > 0, mask > 0)
    assert choices["result"][0]["value"] == {"choices": ["dog <b>&'"]}
    config = (tmp_path / "label_studio.xml").read_text()
    assert "dog &lt;b&gt;&amp;" in config
    assert "<b>" not in config


def test_no_prediction_is_a_list_of_no_tasks(tmp_path):
    written(LabelStudioWriter(tmp_path, CLASSES))
    assert json.loads((tmp_path / "label_studio.json").read_text()) == []


def test_classes_of_whole_images_are_for_label_studio_alone(tmp_path):
    for writer in (CocoWriter, YoloWriter):
        with pytest.raises(SettingsError, match="a classifier has no boxes or shapes"):
            writer(tmp_path, CLASSES).add(classified("a.png"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.png", "--format", "coco"], "give -o DIR"),
        (["a.png", "clip.mp4", "--format", "coco", "-o", "out"], "not of videos such as clip.mp4"),
        (
            ["a.png", "--image-url", "x", "-o", "out"],
            "--image-url applies to --format label-studio",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    save_images(tmp_path, "a.png")
    (tmp_path / "clip.mp4").touch()
    assert main(["predict", *words]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "segmentation", "detection"])
def test_the_command_writes_what_it_predicts(tmp_path, capsys, project, task):
    photos = tmp_path / "photos/deep"
    photos.mkdir(parents=True)
    (photos / "cat.jpg").write_bytes((project / "tests/golden/files/cat.jpg").read_bytes())
    out = tmp_path / "out"
    words = ["predict", str(tmp_path / "photos"), "--task", task, "-o", str(out), "--device", "cpu"]
    words += ["--no-drawing", "--json", "--format"]
    assert main([*words, "label-studio", "--image-url", "http://x/"]) == 0
    (one,) = json.loads((out / "label_studio.json").read_text())
    assert one["data"]["image"] == "http://x/deep/cat.jpg"
    assert one["predictions"][0]["result"]
    capsys.readouterr()
    if task == "classification":
        assert main([*words, "coco"]) == 1
        return
    assert main([*words, "coco"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    content = json.loads((out / "coco.json").read_text())
    assert content["images"][0]["file_name"] == "deep/cat.jpg"
    assert main([*words, "yolo"]) == 0
    lines = (out / "yolo/labels/deep/cat.txt").read_text().splitlines()
    assert len(lines) == len(content["annotations"])
    if task == "detection":
        assert [e["bbox"] for e in content["annotations"]] == [
            o["bbox"] for o in predicted["objects"]
        ]
        shape = content["annotations"][0]["segmentation"]
        assert rle.draw(shape, (predicted["height"], predicted["width"])).any()


@pytest.mark.parametrize(
    "name", ["a.tar/../../../x.png", "../x.png", "/x.png", "a\0b.png", f"{'x' * 300}.png"]
)
def test_names_of_an_archive_lead_to_no_file_outside_of_the_folder(tmp_path, name):
    out = tmp_path / "one" / "two" / "out"
    out.mkdir(parents=True)
    written(YoloWriter(out, CLASSES, [Path(".")]), detected(name))
    written(CocoWriter(out, CLASSES, [Path(".")]), detected(name))
    labels = list(tmp_path.rglob("*.txt"))
    assert len(labels) == 1
    assert labels[0].is_relative_to(out / "yolo" / "labels")
    (image,) = json.loads((out / "coco.json").read_text())["images"]
    assert ".." not in Path(image["file_name"]).parts
