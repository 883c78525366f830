"""Objects from annotation files, trimaps, masks and scenes, and the errors for invalid ones."""

import copy
import json
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.datasets import coco_json, recipe_on_coco, write_coco

from pale.cli.main import main
from pale.data import rle
from pale.data.checks.instances import check_instances
from pale.data.reading import UnreadableImageError
from pale.data.sources.coco import CocoFiles
from pale.data.sources.convert import convert_masks
from pale.data.sources.instances import (
    Instances,
    PetSilhouettes,
    SceneInstances,
    from_masks,
    read_instances,
)
from pale.data.sources.scenes import Scenes


def coco(root: Path, split: str = "train", **changes) -> CocoFiles:
    return CocoFiles(root / "annotations" / f"{split}.json", root / split, **changes)


@given(st.integers(0, 10_000))
def test_run_length_codes_keep_every_pixel(seed):
    rng = np.random.default_rng(seed)
    mask = (rng.random(tuple(rng.integers(1, 30, 2))) < rng.random()).astype(np.uint8)
    code = rle.encode(mask)
    json.dumps(code)
    assert np.array_equal(rle.draw(code, mask.shape), mask)
    assert rle.shape_problem(code, mask.shape) is None
    pixels = mask.ravel("F")
    changes = np.flatnonzero(np.diff(pixels, prepend=0)).tolist()
    assert rle.run_lengths(code["counts"]) == np.diff([0, *changes, len(pixels)]).tolist()
    assert rle.area(code, mask.shape) == mask.sum()


def test_polygons_are_scaled_before_they_are_drawn():
    triangle = [[0.0, 0, 20, 0, 0, 20]]
    small, large = rle.draw(triangle, (20, 20)), rle.draw(triangle, (20, 20), (200, 200))
    assert large.shape == (200, 200)
    assert large.mean() == pytest.approx(0.5, abs=0.02)
    assert small.mean() == pytest.approx(0.5, abs=0.06)
    # A drawing of the small mask, enlarged, would have steps of ten pixels on its slope.
    assert np.unique(large.sum(1)).size > 150


def test_uncompressed_codes_are_read_and_scaled():
    code = {"size": [4, 6], "counts": [4, 8, 12]}  # columns 1 and 2
    mask = rle.draw(code, (4, 6))
    assert mask.sum() == 8
    assert mask[:, 1:3].all()
    assert rle.draw(code, (4, 6), (8, 12))[:, 2:6].all()


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ([[1, 2, 3, 4]], "three points"),
        ([[1, 2, 3, 4, 5]], "three points"),
        ([[1, 2, 3, 4, 5, None]], "invalid coordinate"),
        ([[1, 2, 3, 4, 5, float("nan")]], "invalid coordinate"),
        ([["a"] * 6], "invalid coordinate"),
        ({"size": [4, 4], "counts": [3, 3]}, "run lengths of 6 pixels for 4x4"),
        ({"counts": [3, 3]}, "without its size"),
        ({"size": [4, 4]}, "without counts"),
        ({"size": ["a", "b"], "counts": [16]}, "whose size is ['a', 'b']"),
        ({"size": [4, 4], "counts": [-5, 21]}, "'[-5, 21]' are invalid run lengths"),
        ({"size": [4, 4], "counts": ["a", "b"]}, "are invalid run lengths"),
        ({"size": [4, 4], "counts": "zzzz!!"}, "'zzzz!!' are invalid run lengths"),
        ({"size": [4, 4], "counts": "Xüüü"}, "are invalid run lengths"),
        # Ends in the middle of a number.
        ({"size": [4, 4], "counts": "o"}, "are invalid run lengths"),
        ({"size": [4, 4], "counts": "ooooooooooo0"}, "are invalid run lengths"),
        ({"size": [4, 4], "counts": "4"}, "run lengths of 4 pixels for 4x4"),
        ({"size": [6, 4], "counts": [24]}, "a run-length code for 4x6 in an image of 4x4"),
        (5, "int is not a shape"),
    ],
    ids=str,
)
def test_broken_shapes_are_reported(shape, reason):
    assert reason in rle.shape_problem(shape, (4, 4))


@pytest.mark.parametrize("shape", [None, [], [[0, 0, 4, 0, 4, 4]], {"size": [2, 2], "counts": [4]}])
def test_valid_shapes_have_no_problem(shape):
    assert rle.shape_problem(shape) is None


def test_pasted_masks_fill_their_box_and_nothing_else():
    ones = np.ones((3, 28, 28), np.float32)
    boxes = np.array([[10.0, 20, 50, 80], [-20, -20, 15, 15], [90, 90, 90, 95]])
    full, cut, empty = rle.paste_masks(ones, boxes, (100, 100))
    assert full[20:80, 10:50].all()
    assert full.sum() == 40 * 60
    assert cut[:15, :15].all()
    assert cut.sum() == 225
    assert not empty.any()


@given(st.integers(0, 1000))
def test_pasting_is_bilinear_like_grid_sample(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((28, 28), np.float32)
    left, top = rng.uniform(-10, 40, 2)
    w, h = rng.uniform(2, 40, 2)
    x = (torch.arange(50) + 0.5 - left) / w * 2 - 1
    y = (torch.arange(40) + 0.5 - top) / h * 2 - 1
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)[None].float()
    expected = F.grid_sample(torch.from_numpy(mask)[None, None], grid, align_corners=False)[0, 0]
    found = rle.paste_masks(mask[None], np.array([[left, top, left + w, top + h]]), (40, 50))[0]
    sure = (expected - 0.5).abs().numpy() > 1e-3
    assert np.array_equal(found[sure], (expected >= 0.5).numpy()[sure])


def test_coco_files_are_read_as_written(tmp_path):
    source = coco(write_coco(tmp_path))
    scenes = SceneInstances(Scenes(6, 48, 0, (1, 3)))
    assert len(source) == 6
    assert source.classes == scenes.classes
    assert source.categories == [2, 5, 8, 11, 14, 17, 20, 23]  # gaps are closed
    assert source.shaped
    assert source.notes == []
    for i in range(6):
        image, found = read_instances(source, i)
        theirs_image, theirs = read_instances(scenes, i)
        assert np.array_equal(np.asarray(image), np.asarray(theirs_image))
        assert np.array_equal(found.labels, theirs.labels)
        assert np.array_equal(found.boxes, theirs.boxes)
        assert np.array_equal(found.masks(), theirs.masks())
        assert source.image_id(i) == 100 + i
        assert source.size(i) == (48, 48)


def test_objects_of_scenes_match_the_drawn_ones():
    scenes = Scenes(8, 64, 3, (2, 4))
    for i in range(8):
        scene, found = scenes[i], SceneInstances(scenes).instances(i)
        assert np.array_equal(found.boxes, scene.boxes)
        for k, mask in enumerate(found.masks()):
            assert np.array_equal(mask > 0, scene.instances == k + 1)
            assert found.areas[k] == mask.sum()


def write_changed_coco(tmp_path, change) -> Path:
    return write_coco(tmp_path, change=lambda split, c: change(c) if split == "train" else None)


def test_unusable_annotations_are_left_out_and_counted(tmp_path):
    def change(content):
        first = content["annotations"][0]
        extra = [
            first | {"id": 900, "bbox": [5, 5, 0, 10]},
            first | {"id": 901, "bbox": [500, 5, 20, 10]},
            first | {"id": 902, "image_id": 12345},
            first | {"id": 903, "segmentation": [[1, 2, 3, 4]]},
            first | {"id": 904, "bbox": [1, 2, float("nan"), 4]},
            first | {"id": 905, "bbox": "none"},
            first | {"id": 906, "bbox": [-5, -5, 20, 20]},
            first | {"id": 907, "segmentation": {"size": [48, 48], "counts": "zzzz!!"}},
            first | {"id": 908, "segmentation": {"size": [24, 24], "counts": [576]}},
        ]
        content["annotations"] += extra

    source = coco(write_changed_coco(tmp_path, change))
    assert source.left_out == {
        "boxes thinner than 1 pixel": 1,
        "boxes outside their image": 1,
        "annotations without an image": 1,
        "annotations with a broken shape": 3,
        "annotations with an invalid box": 2,
    }
    assert "train.json: 2 annotations with an invalid box left out" in source.notes
    assert [0.0, 0.0, 15.0, 15.0] in source.instances(0).boxes.tolist()  # clipped to the image


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["annotations"][0].update(category_id=77),
            "annotation 1 has the category 77, which is not",
        ),
        (lambda c: c["images"][1].update(id=100), "1 image ids occur twice, such as 100"),
        (lambda c: c["categories"][1].update(id=2), "the category id 2 occurs twice"),
        (lambda c: c["categories"][1].pop("name"), "a category needs an id and a name"),
        (lambda c: c["images"][0].pop("file_name"), "an image needs an id and a file_name"),
        (lambda c: c.pop("annotations"), "has no list of 'annotations'"),
        (lambda c: c["categories"].clear(), "lists no categories"),
        (
            lambda c: c["images"].append("abc"),
            r"train\.json: entry 6 of images is 'abc', not an object",
        ),
        (lambda c: c["annotations"].insert(1, 7), "entry 1 of annotations is '7', not an object"),
        (lambda c: c["categories"].insert(0, None), "entry 0 of categories is 'None', not an"),
        (lambda c: c["images"][2].update(width="abc"), "entry 2 of images has the width 'abc'"),
        (lambda c: c["images"][2].update(height=-4), "entry 2 of images has the height '-4'"),
        (lambda c: c["annotations"][0].update(image_id=[1]), r"entry 0 .* has the image_id \[1\]"),
    ],
    ids=[
        "category",
        "image id",
        "category id",
        "category name",
        "file name",
        "part",
        "no category",
        "image",
        "annotation",
        "category entry",
        "width",
        "height",
        "list",
    ],
)
def test_ambiguous_files_raise_and_name_the_entry(tmp_path, change, message):
    root = write_changed_coco(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        coco(root)


def test_sizes_may_be_strings_and_unknown_keys_are_ignored(tmp_path):
    def change(content):
        for entry in content["images"]:
            entry |= {"width": str(entry["width"]), "height": float(entry["height"])}
        content["annotations"][0]["width"] = "wide"

    plain, root = write_coco(tmp_path / "plain"), write_changed_coco(tmp_path / "words", change)
    assert [coco(root).size(i) for i in range(3)] == [coco(plain).size(i) for i in range(3)]


def test_missing_areas_are_computed_from_shape_or_box(tmp_path):
    def change(content):
        for i, entry in enumerate(content["annotations"]):
            entry["area"] = None
            if i % 2:
                del entry["area"], entry["segmentation"]

    source, whole = (
        coco(write_changed_coco(tmp_path, change)),
        SceneInstances(Scenes(6, 48, 0, (1, 3))),
    )
    areas = np.concatenate([source.instances(i).areas for i in range(6)])
    shapes = np.concatenate([whole.instances(i).areas for i in range(6)])
    boxes = np.concatenate([whole.instances(i).boxes for i in range(6)])
    assert np.array_equal(areas[::2], shapes[::2])
    assert np.array_equal(areas[1::2], (boxes[:, 2:] - boxes[:, :2]).prod(1)[1::2])


def test_missing_files_and_invalid_json_raise(tmp_path):
    with pytest.raises(ValueError, match="there is no annotation file"):
        CocoFiles(tmp_path / "a.json", tmp_path)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        CocoFiles(tmp_path / "a.json", tmp_path)


def test_a_missing_image_is_named_before_training(tmp_path):
    root = write_coco(tmp_path)
    (root / "train/3.png").unlink()
    (root / "train/4.png").unlink()
    with pytest.raises(
        ValueError, match=r"train\.json lists .*train/3\.png \(and 1 more\), but there is no such"
    ):
        recipe_on_coco(root).task()


def test_an_image_of_another_size_than_annotated_raises(tmp_path):
    root = write_coco(tmp_path)
    Image.new("RGB", (50, 48)).save(root / "train/0.png")
    with pytest.raises(
        UnreadableImageError, match=r"is 50x48, train\.json has 48x48; boxes would be misplaced"
    ):
        coco(root).image(0)


@pytest.mark.parametrize("split", ["train", "val"])
def test_images_that_do_not_match_their_annotations_are_named_before_training(tmp_path, split):
    root = write_coco(tmp_path)
    Image.new("RGB", (50, 48)).save(root / split / "1.png")
    Image.new("RGB", (50, 48)).save(root / split / "2.png")
    with pytest.raises(
        UnreadableImageError,
        match=rf"{split}/1\.png is 50x48, {split}\.json has 48x48; .* \(and 1 more such images\)",
    ):
        recipe_on_coco(root).task()
    recipe_on_coco(root, data__limit=1).task()  # unused images are not checked
    recipe_on_coco(root, data__check=False).task()
    (root / split / "2.png").unlink()
    (root / split / "1.png").write_bytes(b"not an image")
    Image.new("RGB", (48, 48)).save(root / split / "2.png")
    with pytest.raises(UnreadableImageError, match=r"1\.png: cannot be read as an image"):
        recipe_on_coco(root).task()


def test_a_huge_image_is_named_before_training(tmp_path, monkeypatch):
    root = write_coco(tmp_path)
    monkeypatch.setattr("pale.data.reading.MAX_PIXELS", 48 * 48 - 1)
    with pytest.raises(UnreadableImageError, match=r"0\.png: more than 2,303 pixels \(48x48\)"):
        recipe_on_coco(root).task()


def test_held_out_images_are_checked_too(tmp_path):
    root = write_coco(tmp_path, counts=(10, 1))
    Image.new("RGB", (50, 48)).save(root / "train/0.png")
    one = {"data__annotations": "annotations/train.json", "data__images": "train"}
    with pytest.raises(UnreadableImageError, match=r"0\.png is 50x48"):
        recipe_on_coco(root, **one, data__hold_out=0.3, data__limit=7).task()


def test_a_validation_set_without_objects_is_rejected_before_training(tmp_path):
    root = write_coco(tmp_path, change=lambda s, c: s == "val" and c["annotations"].clear())
    with pytest.raises(ValueError, match="no object in the 3 images of the validation set"):
        recipe_on_coco(root).task()


def test_a_huge_image_raises_and_is_named(tmp_path, monkeypatch):
    root = write_coco(tmp_path)
    monkeypatch.setattr("pale.data.reading.MAX_PIXELS", 48 * 48 - 1)
    with pytest.raises(UnreadableImageError, match=r"0\.png: more than 2,303 pixels \(48x48\)"):
        coco(root).image(0)


def test_without_faster_coco_eval_the_error_names_the_package(tmp_path, monkeypatch):
    root = write_coco(tmp_path)
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core", None)
    with pytest.raises(RuntimeError, match=r"pip install 'pale-transformer\[det\]'"):
        recipe_on_coco(root).task()


def test_missing_sizes_are_read_from_the_files(tmp_path):
    def change(content):
        for image in content["images"]:
            del image["height"], image["width"]

    source = coco(write_changed_coco(tmp_path, change))
    assert source.size(0) == (48, 48)
    assert source.instances(0).size == (48, 48)
    assert read_instances(source, 0)[1].masks().any()


def test_images_without_objects_are_used_only_for_validation(tmp_path):
    def change(content):
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] != 102]
        for entry in content["annotations"]:
            if entry["image_id"] == 103:
                entry["iscrowd"] = 1

    root = write_changed_coco(tmp_path, change)
    every, some = coco(root), coco(root, keep_empty=False)
    assert (len(every), len(some)) == (6, 4)
    assert len(every.instances(2)) == 0
    assert every.instances(3).crowd.all()
    assert some.notes == ["train.json: 2 images without objects left out"]
    with pytest.raises(ValueError, match="there is nothing to learn from"):
        coco(
            write_changed_coco(tmp_path / "b", lambda c: c["annotations"].clear()), keep_empty=False
        )


def test_classes_of_both_splits_must_agree(tmp_path):
    root = write_coco(
        tmp_path,
        change=lambda split, c: (
            c["categories"].pop() and None
            if split == "val" and not any(a["category_id"] == 23 for a in c["annotations"])
            else None
        ),
    )
    content = json.loads((root / "annotations/val.json").read_text())
    content["categories"][0]["name"] = "blob"
    (root / "annotations/val.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is it the right dataset"):
        recipe_on_coco(root).task()


def test_boxes_without_shapes_need_a_detector_of_boxes(tmp_path):
    def change(content):
        for entry in content["annotations"]:
            del entry["segmentation"]

    root = write_changed_coco(tmp_path, change)
    with pytest.raises(ValueError, match=r"no shape .* set model\.heads\.masks=false"):
        recipe_on_coco(root).task()
    task = recipe_on_coco(root, model__heads__masks=False).task()
    batch = task.collate([task.train_data(torch.device("cpu"))[(0, i)] for i in range(2)])
    assert "masks" not in batch


def test_a_single_file_needs_hold_out(tmp_path):
    root = write_coco(tmp_path, counts=(10, 1))
    one = {"data__annotations": "annotations/train.json", "data__images": "train"}
    with pytest.raises(ValueError, match=r"mark the split with \{split\} in it, or"):
        recipe_on_coco(root, **one).task()
    task = recipe_on_coco(root, **one, data__hold_out=0.3).task()
    assert (len(task.train_source), len(task.val_source)) == (7, 3)
    ids = [{s.image_id(i) for i in range(len(s))} for s in (task.train_source, task.val_source)]
    assert ids[0] | ids[1] == set(range(100, 110))


def test_held_out_images_without_objects_are_used_for_validation(tmp_path):
    def change(split, content):
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] % 2]

    root = write_coco(tmp_path, counts=(10, 1), change=change)
    one = {"data__annotations": "annotations/train.json", "data__images": "train"}
    task = recipe_on_coco(root, **one, data__hold_out=0.6).task()
    held = {task.val_source.image_id(i) for i in range(len(task.val_source))}
    trained = {task.train_source.image_id(i) for i in range(len(task.train_source))}
    assert len(held) == 6
    assert any(i % 2 == 0 for i in held)
    assert trained == {101, 103, 105, 107, 109} - held
    task.model()
    lines = [note for note in task.notes if "without objects" in note]
    assert lines == [f"training set: {4 - len(trained)} images without objects left out"]
    every = recipe_on_coco(root, **one, data__hold_out=0.6, data__keep_empty=True).task()
    assert len(every.train_source) == 4


def test_annotations_left_out_of_both_parts_are_logged_once(tmp_path):
    def change(split, content):
        content["annotations"].append(content["annotations"][0] | {"id": 900, "bbox": None})

    root = write_coco(tmp_path, counts=(10, 1), change=change)
    one = {"data__annotations": "annotations/train.json", "data__images": "train"}
    task = recipe_on_coco(root, **one, data__hold_out=0.3).task()
    task.model()
    assert sum("invalid box left out" in note for note in task.notes) == 1


def test_instance_masks_become_coco_json(tmp_path):
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    values = np.zeros((20, 30), np.uint16)
    values[2:8, 3:9], values[10:15, 20:25] = 1001, 2007
    Image.new("RGB", (30, 20)).save(tmp_path / "images/a.jpg")
    Image.fromarray(values).save(tmp_path / "masks/a.png")
    content = convert_masks(tmp_path / "images", tmp_path / "masks", ["cat", "dog"], 1000)
    assert [a["bbox"] for a in content["annotations"]] == [[3, 2, 6, 6], [20, 10, 5, 5]]
    assert [a["category_id"] for a in content["annotations"]] == [1, 2]
    (tmp_path / "a.json").write_text(json.dumps(content))
    masks = CocoFiles(tmp_path / "a.json", tmp_path / "images").instances(0).masks()
    assert np.array_equal(masks[1] > 0, values == 2007)
    one = convert_masks(tmp_path / "images", tmp_path / "masks", ["pet"])
    assert [a["category_id"] for a in one["annotations"]] == [1, 1]
    with pytest.raises(UnreadableImageError, match="the value 2007 gives the class 2, there are 1"):
        convert_masks(tmp_path / "images", tmp_path / "masks", ["pet"], 1000)
    with pytest.raises(ValueError, match="2 classes need a divisor"):
        convert_masks(tmp_path / "images", tmp_path / "masks", ["cat", "dog"])
    Image.new("RGB", (31, 20)).save(tmp_path / "images/a.jpg")
    with pytest.raises(UnreadableImageError, match="is 31x20, its mask 30x20"):
        convert_masks(tmp_path / "images", tmp_path / "masks", ["pet"])


@pytest.fixture
def street(tmp_path):
    for folder in ("my images", "masks"):
        (tmp_path / folder).mkdir()
    values = np.full((20, 30), 7, np.uint16)  # road
    values[2:8, 3:9], values[12:] = 1001, 11
    for name in ("a", "b"):
        Image.new("RGB", (30, 20)).save(tmp_path / "my images" / f"{name}.jpg")
        Image.fromarray(values).save(tmp_path / "masks" / f"{name}.png")
    return tmp_path


def coco_command(root: Path, *words: str) -> list[str]:
    folders = [str(root / name) for name in ("my images", "masks")]
    return ["data", "coco", *folders, "-o", str(root / "all objects.json"), *words]


def test_values_below_the_divisor_are_regions_and_counted(street, capsys):
    assert main(coco_command(street, "--classes", "car", "--divisor", "1000")) == 0
    out = capsys.readouterr().out
    assert "2 images, 2 objects" in out
    assert "4 regions with values below the divisor are left out: values 7, 11" in out
    assert f"--data.images '{street / 'my images'}' " in out
    assert f"--data.annotations '{street / 'all objects.json'}' " in out
    assert main(coco_command(street, "--divisor", "1000", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == {"7": 2, "11": 2}
    content = json.loads((street / "all objects.json").read_text())
    assert [a["bbox"] for a in content["annotations"]] == [[3, 2, 6, 6]] * 2


@pytest.mark.parametrize("divisor", ["0", "-5"])
def test_a_divisor_must_be_positive(street, capsys, divisor):
    assert main(coco_command(street, "--divisor", divisor)) == 1
    assert f"the divisor must be 1 or more, got {divisor}" in capsys.readouterr().err


def test_an_instance_mask_that_cannot_be_read_is_named(street, capsys):
    (street / "masks/b.png").write_bytes(b"no mask")
    assert main(coco_command(street)) == 1
    assert "masks/b.png: cannot be read as a mask" in capsys.readouterr().err
    (street / "masks/b.png").unlink()
    Image.fromarray(np.zeros((20, 30), np.float32)).save(street / "masks/b.tif")
    assert main(coco_command(street)) == 1
    assert "masks/b.tif: an instance mask contains integers" in capsys.readouterr().err


def test_objects_can_be_selected_and_empty_masks_are_left_out():
    masks = np.zeros((3, 8, 8), np.uint8)
    masks[0, 1:3, 2:5] = masks[2, 4:, 4:] = 1
    found = from_masks((8, 8), masks, [4, 5, 6])
    assert found.labels.tolist() == [4, 6]
    assert found.boxes.tolist() == [[2, 1, 5, 3], [4, 4, 8, 8]]
    selected = found.subset(np.array([False, True]))
    assert isinstance(selected, Instances)
    assert selected.labels.tolist() == [6]
    assert np.array_equal(selected.masks()[0], masks[2])


def kinds(report) -> dict[str, int]:
    return {p.kind: len(p.items) for p in report.problems}


def test_images_of_other_shapes_are_not_copies(tmp_path):
    root = write_coco(tmp_path, counts=(1, 1))
    for split, size in (("train", (48, 24)), ("val", (24, 48))):
        Image.new("RGB", size, "white").save(root / split / "0.png")
        path = root / "annotations" / f"{split}.json"
        content = json.loads(path.read_text())
        content["images"][0] |= {"width": size[0], "height": size[1]}
        path.write_text(json.dumps(content))
    splits = {s: (root / f"annotations/{s}.json", root / s) for s in ("train", "val")}
    assert "the same image in two splits" not in kinds(check_instances(splits))


def test_the_check_names_everything_at_once(tmp_path, capsys):
    def change(split, content):
        if split != "train":
            return
        first = copy.deepcopy(content["annotations"][0])
        content["annotations"] += [
            first | {"id": 900, "category_id": 99},
            first | {"id": 901, "image_id": 12345},
            first | {"id": 902, "bbox": [5, 5, 0, 10]},
            first | {"id": 903, "bbox": [40, 5, 60, 10]},
            first | {"id": 904, "segmentation": [[1, 2, 3, 4]]},
            first | {"id": 904, "bbox": None},
        ]
        content["images"].append({"id": 101, "file_name": "gone.png"})

    root = write_coco(tmp_path, change=change)
    (root / "train/2.png").write_bytes(b"not an image")
    (root / "val/0.png").write_bytes((root / "train/1.png").read_bytes())
    splits = {s: (root / "annotations" / f"{s}.json", root / s) for s in ("train", "val")}
    report = check_instances(splits)
    assert not report.good
    found = kinds(report)
    for kind in (
        "unknown categories",
        "annotations without an image",
        "boxes without area",
        "boxes outside their image",
        "broken shapes",
        "invalid boxes",
        "missing images",
        "unusable images",
        "ids of images that occur twice",
        "ids of annotations that occur twice",
        "the same image in two splits",
    ):
        assert found.pop(kind) == 1, kind
    assert report.splits["train"]["images"] == 7
    command = ["data", "check", str(root), "--annotations", "annotations/{split}.json"]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "problem: unknown categories (1); list them in categories, or remove them" in out
    assert "annotation 903: by 52.0 pixels, in 0.png" in out
    assert "not ready" in out


@pytest.mark.parametrize(
    ("split", "change", "expected"),
    [
        (
            "train",
            lambda c: c["annotations"].clear(),
            "nothing to learn from (1); is it the right file?\n  train: no usable object",
        ),
        (
            "train",
            lambda c: [a.update(bbox=[9, 9, 0, 0]) for a in c["annotations"]],
            "nothing to learn from",
        ),
        (
            "val",
            lambda c: c["annotations"].clear(),
            "nothing to measure (1); is it the right file?\n  val: no usable object",
        ),
        (
            "val",
            lambda c: c["annotations"].clear() or c["images"].clear(),
            "nothing to measure (1); is it the right file?\n  val: no images",
        ),
        ("val", lambda c: c["images"][0].pop("file_name"), "incomplete entries (1)"),
    ],
    ids=["no annotations", "no box", "no objects", "no images", "no file name"],
)
def test_the_check_rejects_what_training_rejects(tmp_path, capsys, split, change, expected):
    root = write_coco(tmp_path, change=lambda s, c: s == split and change(c))
    with pytest.raises(ValueError, match=r"\w"):
        recipe_on_coco(root).task()
    assert main(["data", "check", str(root), "--annotations", "annotations/{split}.json"]) == 1
    out = capsys.readouterr().out
    assert expected in out
    assert "not ready" in out


def test_a_valid_dataset_is_ready(tmp_path, capsys):
    root = write_coco(tmp_path, counts=(6, 3))
    command = ["data", "check", str(root), "--annotations", "annotations/{split}.json", "--json"]
    assert main(command) == 0
    plain = json.loads(capsys.readouterr().out)
    total = len(coco_json(0, 6)["annotations"])
    assert plain["good"]
    assert plain["splits"]["train"]["objects"] == total
    assert sum(c["objects"] for c in plain["splits"]["train"]["classes"].values()) == total


def archive(project, name: str) -> Path:
    path = Path(os.environ.get("PALE_DATA", project.parent / "shared/data")) / name
    if not path.is_file():
        pytest.skip(f"{path} does not exist; PALE_DATA names the folder")
    return path


@pytest.mark.data
def test_pet_silhouettes_are_read(project, tmp_path):
    with tarfile.open(archive(project, "pets-mini.tar")) as tar:
        tar.extractall(tmp_path, filter="data")
    root = next(tmp_path.rglob("annotations")).parent
    source = PetSilhouettes(root, "test")
    assert len(source) == 148
    for i in range(0, 148, 37):
        image, found = read_instances(source, i)
        assert len(found) == 1
        assert source.size(i) == (image.height, image.width) == found.size
        mask = found.masks()[0]
        assert 0.03 < mask.mean() < 1
        left, top, right, bottom = found.boxes[0].astype(int)
        assert mask[top:bottom, left:right].sum() == mask.sum()
    names = [source.name(i) for i in range(148)]
    cats = [n for i, n in enumerate(names) if source.instances(i).labels[0] == 0]
    assert all(Path(n).name[0].isupper() for n in cats)  # cats' breeds are upper case there
    with pytest.raises(ValueError, match="there is no list"):
        PetSilhouettes(root, "val")
