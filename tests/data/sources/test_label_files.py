"""YOLO's and Pascal VOC's labels: what was written is read, hostile and broken files are errors that name the place."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.label_files import (
    SIZE,
    SPLITS,
    detection_on,
    save_palette,
    scenes,
    segmentation_on,
    visible,
    voc_object,
    voc_xml,
    write_voc,
    write_yolo,
)

from pale.cli.main import main
from pale.data import rle
from pale.data.reading import UnreadableImageError
from pale.data.sources.coco import CocoFiles
from pale.data.sources.label_files import LabelledImages
from pale.data.sources.label_formats import detect_format, read_labels
from pale.data.sources.scenes import CLASSES
from pale.data.sources.voc import mask_entries, parse_annotation
from pale.data.sources.xml_files import read_xml
from pale.data.sources.yolo import YoloDataset, YoloMasks, parse_labels
from pale.errors import DataError
from pale.tools.check_data import check_labels
from pale.train.distributed import World
from pale.train.loop import train

CPU = World(torch.device("cpu"))


def one_image(
    root: Path, label: str | None = None, size=(60, 40), names: str = "[cat, dog]"
) -> Path:
    """Write a YOLO dataset of one image."""
    for part in ("images", "labels"):
        (root / part / "train").mkdir(parents=True)
    Image.new("RGB", size).save(root / "images/train/a.png")
    if label is not None:
        (root / "labels/train/a.txt").write_text(label)
    (root / "data.yaml").write_text(f"train: images/train\nnames: {names}\n")
    return root


def one_voc(root: Path, xml: str, size=(60, 40)) -> Path:
    """Write a VOC dataset of one image."""
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / part).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(root / "JPEGImages/a.jpg")
    (root / "Annotations/a.xml").write_text(xml)
    (root / "ImageSets/Main/train.txt").write_text("a\n")
    return root


def boxes(found: LabelledImages) -> list[list[float]]:
    return [entry["bbox"] for entry in found.content["annotations"]]


def source(found: LabelledImages, **options) -> CocoFiles:
    return CocoFiles(
        found.origin, found.folder, content=found.require_readable().content, **options
    )


@pytest.mark.parametrize("kind", ["yolo", "voc", "yolo boxes"])
def test_objects_are_those_that_were_written(tmp_path, kind):
    root = write_voc(tmp_path) if kind == "voc" else write_yolo(tmp_path, kind == "yolo")
    for split in SPLITS:
        found = source(read_labels("voc" if kind == "voc" else "yolo", root, split))
        assert found.classes == list(CLASSES)
        assert found.shaped == (kind != "yolo boxes")
        assert len(found) == SPLITS[split][1]
        for i, scene in enumerate(scenes(split)):
            assert np.array_equal(np.asarray(found.image(i)), scene.image)
            own, expected = found.instances(i), list(visible(scene))
            assert own.labels.tolist() == [label for label, _ in expected]
            for box, (_, mask) in zip(own.boxes, expected, strict=True):
                assert box == pytest.approx(rle.box_of(mask), abs=1e-3)
            if found.shaped:
                assert np.array_equal(own.masks(), np.stack([mask for _, mask in expected]))


@pytest.mark.parametrize("kind", ["yolo", "voc"])
def test_masks_are_those_that_were_drawn(tmp_path, kind):
    root = write_voc(tmp_path) if kind == "voc" else write_yolo(tmp_path)
    data = segmentation_on(kind, root).data
    found = data.val_source(0)
    assert found.classes.names == ["background", *CLASSES]
    for i, scene in enumerate(scenes("val")):
        assert np.array_equal(found.mask(i), scene.mask)
        assert np.array_equal(np.asarray(found.image(i)), scene.image)


@pytest.mark.parametrize("kind", ["yolo", "voc"])
def test_tasks_read_both_formats_and_hold_out_a_share(tmp_path, kind):
    root = write_voc(tmp_path) if kind == "voc" else write_yolo(tmp_path)
    for recipe_on, length in ((detection_on, 6), (segmentation_on, 6)):
        task = recipe_on(kind, root).task()
        assert (len(task.train_source), len(task.val_source)) == (length, 3)
        task = recipe_on(kind, root, data__hold_out=0.5).task()
        assert (len(task.train_source), len(task.val_source)) == (3, 3)
    names = [task.val_source.name(i) for i in range(3)]
    assert not {task.train_source.name(i) for i in range(3)} & set(names)


@pytest.mark.parametrize("kind", ["yolo", "voc"])
def test_recipes_of_own_data_need_only_a_root(tmp_path, kind):
    from pale import recipes

    root = write_voc(tmp_path) if kind == "voc" else write_yolo(tmp_path)
    for name in ("small_boxes.mask_rcnn_nano", "small_masks.upernet_nano"):
        settings = {"data.kind": kind, "data.root": str(root)}
        recipe = recipes.get(name).changed(settings)
        assert recipe.task().classes[-len(CLASSES) :] == list(CLASSES)
        with pytest.raises(
            ValueError, match=r"data.images has no effect while data.kind is yolo or voc"
        ):
            recipes.get(name).changed(settings | {"data.images": "photos"})


# YOLO: data.yaml


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("train: images/train\nnames: [cat, dog]\nnc: 2", "."),
        ("train: images/train\nnames:\n  1: dog\n  0: cat", "."),
        ("path: .\ntrain: images/train\nnames: [cat, dog]", "."),
        ("path: /home/somebody/set\ntrain: images/train\nval: x\nnames: [cat, dog]", "."),
        ("path: ../datasets/set\ntrain: [images/train]\nnames: [cat, dog]", "."),
        ("train: ../images/train\nnames: [cat, dog]", "."),  # Roboflow
        ("train: ../train.txt\nnames: [cat, dog]", "."),
        ("names: [cat, dog]", "."),
        ("train: images/train\nnames: [cat, dog]", "data.yaml"),
        ("path: images\ntrain: train\nnames: [cat, dog]", "."),
    ],
)
def test_ways_to_write_data_yaml(tmp_path, text, root):
    one_image(tmp_path, "1 .5 .5 .5 .5")
    (tmp_path / "data.yaml").write_text(text)
    (tmp_path / "train.txt").write_text("./images/train/a.png\n\n")
    found = read_labels("yolo", tmp_path / root, "train")
    assert [c["name"] for c in found.content["categories"]] == ["cat", "dog"]
    assert boxes(found) == [[15, 10, 30, 20]]
    assert found.content["images"][0]["file_name"] == "images/train/a.png"


def test_classes_txt_alone_is_enough(tmp_path):
    one_image(tmp_path, "1 .5 .5 .5 .5")
    (tmp_path / "data.yaml").unlink()
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert boxes(read_labels("yolo", tmp_path, "train")) == [[15, 10, 30, 20]]
    with pytest.raises(DataError, match=r"no folder images/val or val/images.*data.hold_out"):
        read_labels("yolo", tmp_path, "val")
    assert boxes(read_labels("yolo", tmp_path, "val", whole=True)) == [[15, 10, 30, 20]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: images/train", "names is 'None', not a list of class names"),
        ("names: [cat, [dog]]", "not a list of class names"),
        ("names: {0: cat, 2: dog}", "numbered from 0 without gaps"),
        ("names: [cat]\nnc: 3", "has nc: 3 but 1 class names"),
        ("names: [cat, cat]", "'cat' twice"),
        ("names: []", "names 0 classes"),
        ("names: [cat]\nkpt_shape: [17, 3]", "keypoint labels are not supported"),
        ("names: &a [cat]\ntrain: *a", r"is not YAML: aliases \(\*a\) are not supported"),
        ("names: [cat", "is not YAML"),
        ("- cat", "has no keys"),
        ("names: !!python/object/apply:os.system [true]", "is not YAML"),
        ("names: [cat]\ntrain: ../../etc", "only files inside the dataset are read"),
        ("names: [cat]\ntrain: /etc", "only files inside the dataset are read"),
        ("names: [cat]\ntrain: [3]", "train is '3', not the path"),
        ("names: [cat]\ntrain: list.txt", "line 2: ../../secret.png is outside the dataset"),
        ("names: [cat]\ntrain: empty", "has no images"),
    ],
)
def test_wrong_data_yaml_is_an_error_that_says_why(tmp_path, text, message):
    root = one_image(tmp_path / "set", "0 .5 .5 .5 .5")
    (root / "empty").mkdir()
    (tmp_path / "secret.png").write_bytes((root / "images/train/a.png").read_bytes())
    (root / "list.txt").write_text("images/train/a.png\n../../secret.png\n")
    (root / "data.yaml").write_text(text + "\n")
    with pytest.raises(ValueError, match=message):
        read_labels("yolo", root, "train")


def test_a_folder_without_data_yaml_or_labels_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"there is no data.yaml or classes.txt in"):
        read_labels("yolo", tmp_path, "train")
    root = one_image(tmp_path / "set")
    with pytest.raises(DataError, match=r"none of the 1 images.*expected is .*labels/train/a.txt"):
        read_labels("yolo", root, "train")


# YOLO: lines


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2 .5 .5 .1 .1", "the class 2 is out of range; there are 0 to 1"),
        ("-1 .5 .5 .1 .1", "the class -1 is out of range"),
        ("0.5 .5 .5 .1 .1", "the class 0.5 is out of range"),
        ("0 .5 .5 .1", "4 values; a box has 5"),
        ("0 .5 .5 .1 .1 .9", "6 values; a box has 5"),
        ("0 .1 .1 .2 .2 .3 .3 .4", "8 values"),
        ("0 30 20 10 10", "the coordinate 30 is out of range; .* not pixels"),
        ("0 nan .5 .1 .1", "the coordinate nan is out of range"),
        ("0 .1 .1 .2 .2 inf .3", "the coordinate inf is out of range"),
        ("cat .5 .5 .1 .1", "'cat .5 .5 .1 .1' are not numbers"),
    ],
)
def test_a_wrong_line_is_named_with_file_and_number(tmp_path, line, message):
    root = one_image(tmp_path, f"0 .5 .5 .5 .5\n\n{line}\n1 .2 .2 .1 .1\n")
    found = read_labels("yolo", root, "train")
    assert len(boxes(found)) == 2
    assert len(found.problems) == 1
    with pytest.raises(DataError, match=rf"labels/train/a.txt, line 3: .*{message}"):
        found.require_readable()
    report = check_labels("yolo", root, ["train"]).plain()
    (problem,) = [p for p in report["problems"] if p["kind"] == "labels that cannot be read"]
    assert problem["serious"]
    assert "line 3" in problem["items"][0]


def test_empty_and_missing_label_files_are_images_without_objects(tmp_path):
    root = one_image(tmp_path, "0 .5 .5 .5 .5\n")
    for name in ("b", "c"):
        Image.new("RGB", (20, 30)).save(root / f"images/train/{name}.png")
    (root / "labels/train/b.txt").write_text("\n  \n")
    found = source(read_labels("yolo", root, "train"))
    assert [len(found.instances(i)) for i in range(3)] == [1, 0, 0]
    assert len(source(read_labels("yolo", root, "train"), keep_empty=False)) == 1


def test_line_ends_marks_and_repeated_lines_do_not_matter(tmp_path):
    root = one_image(tmp_path, "\ufeff0 .5 .5 .5 .5\r\n0  .5 .5 .5 .5\r\n1.0 .5 .5 .5 .5\r\n")
    assert boxes(read_labels("yolo", root, "train").require_readable()) == [[15, 10, 30, 20]] * 2


def test_boxes_partly_outside_are_cut_and_thin_ones_left_out(tmp_path):
    root = one_image(tmp_path, "0 0 0 .5 .5\n1 .5 .5 .001 .5\n1 .1 .1 .9 .1 .5 .1\n")
    found = source(read_labels("yolo", root, "train"))
    assert found.instances(0).boxes.tolist() == [[0, 0, 15, 10]]
    assert found.notes == ["data.yaml: 2 boxes thinner than 1 pixel left out"]


def test_coordinates_are_shares_of_the_rotated_image(tmp_path):
    root = one_image(tmp_path, "0 .5 .25 1 .5\n")
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("L", (60, 40))
    image.save(root / "images/train/a.png", exif=exif)
    found = source(read_labels("yolo", root, "train"))
    assert found.size(0) == (60, 40)
    assert found.image(0).size == (40, 60)
    assert found.instances(0).boxes.tolist() == [[0, 0, 40, 30]]


def test_smaller_polygons_are_on_top_and_boxes_are_no_masks(tmp_path):
    small, large = "1 .25 .25 .75 .25 .75 .75 .25 .75", "0 0 0 1 0 1 1 0 1"
    root = one_image(tmp_path, f"{small}\n{large}\n")
    found = YoloMasks(root, "train")
    assert np.unique(found.mask(0), return_counts=True)[1].tolist() == [1800, 600]
    assert found.mask(0)[20, 30] == 2
    (root / "labels/train/a.txt").write_text("0 .5 .5 .5 .5\n")
    with pytest.raises(UnreadableImageError, match=r"a.txt has 1 boxes; masks need polygons"):
        found.mask(0)
    (root / "labels/train/a.txt").unlink()
    assert not found.mask(0).any()
    named = one_image(tmp_path / "b", small, names="[road, background]")
    assert YoloMasks(named, "train").classes.names == ["road", "background"]
    assert np.unique(YoloMasks(named, "train").mask(0)).tolist() == [1]


def test_label_files_lie_beside_images_without_a_folder_images(tmp_path):
    dataset = YoloDataset(one_image(tmp_path, "0 .5 .5 .5 .5"))
    root = dataset.root
    assert dataset.label_path(root / "photos/a.jpg") == root / "photos/a.txt"
    assert dataset.label_path(root / "images/x/images/a.jpg") == root / "images/x/labels/a.txt"


# Pascal VOC


def test_pixels_of_voc_count_from_one_and_include_the_last(tmp_path):
    xml = voc_xml(voc_object("cat", (1, 1, 60, 40)) + voc_object("dog", (11, 6, 20, 8)), (60, 40))
    found = read_labels("voc", one_voc(tmp_path, xml), "train")
    assert boxes(found) == [[0, 0, 60, 40], [10, 5, 10, 3]]
    assert [c["name"] for c in found.content["categories"]] == ["cat", "dog"]


def test_difficult_objects_are_crowds(tmp_path):
    xml = voc_xml(
        voc_object("cat", (1, 1, 9, 9)) + voc_object("cat", (20, 20, 30, 30), 1), (60, 40)
    )
    own = source(read_labels("voc", one_voc(tmp_path, xml), "train")).instances(0)
    assert own.crowd.tolist() == [False, True]
    assert own.areas.tolist() == [81, 121]
    assert rle.draw(own.shapes[1], own.size).sum() == 121


def test_detections_of_difficult_objects_are_neither_hits_nor_mistakes(tmp_path):
    from pale.tasks.detection.metric import average_precision

    xml = voc_xml(
        voc_object("cat", (1, 1, 20, 20)) + voc_object("cat", (31, 21, 50, 40), 1), (60, 40)
    )
    found = source(read_labels("voc", one_voc(tmp_path, xml), "train"))
    labels = found.instances(0).annotations(1, [1])
    hits = [{"image_id": 1, "category_id": 1, "score": s} for s in (0.9, 0.8)]
    hits[0] |= {"bbox": [30.0, 20, 20, 20]}  # the difficult one, with the higher score
    hits[1] |= {"bbox": [0.0, 0, 20, 20]}
    images = [{"id": 1, "height": 40, "width": 60}]
    for hit in hits:
        x, y, w, h = hit["bbox"]
        mask = np.zeros((40, 60), np.uint8)
        mask[int(y) : int(y + h), int(x) : int(x + w)] = 1
        hit["segmentation"] = rle.encode(mask)
    labels[0]["segmentation"] = hits[1]["segmentation"]
    for kind in ("bbox", "segm"):
        assert average_precision(images, labels, hits, [1], kind)[0]["ap"] == pytest.approx(100)


def test_sizes_that_voc_does_not_know_come_from_the_image(tmp_path):
    objects = voc_object("cat", (1, 1, 10, 10)) + "<size/>"
    found = read_labels("voc", one_voc(tmp_path, voc_xml(objects, (0, 0))), "train")
    assert source(found).size(0) == (40, 60)
    wrong = source(read_labels("voc", one_voc(tmp_path, voc_xml(objects, (40, 60))), "train"))
    with pytest.raises(
        UnreadableImageError, match=r"is 60x40, .* has 40x60; boxes would be misplaced"
    ):
        wrong.image(0)


def test_parts_of_objects_are_not_objects(tmp_path):
    part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
    whole = voc_object("cat", (1, 1, 10, 10)).replace("</object>", f"{part}</object>")
    found = read_labels("voc", one_voc(tmp_path, voc_xml(whole, (60, 40))), "train")
    assert len(boxes(found.require_readable())) == 1


BOMB = (
    '<!DOCTYPE a [<!ENTITY x "xxxxxxxxxx"><!ENTITY y "&x;&x;&x;&x;&x;&x;">]>'
    "<annotation><object><name>&y;</name></object></annotation>"
)
EXTERNAL = (
    '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
    "<annotation><object><name>&x;</name></object></annotation>"
)


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        (BOMB, "a document type .* is not supported"),
        (EXTERNAL, "a document type .* is not supported"),
        ("<annotation>&x;</annotation>", "is not XML"),
        ("<annotation>" * 30, "nested more than 20 deep"),
        ("<annotation><object>", "is not XML"),
        ("", "is not XML"),
        ('<?xml version="1.0" encoding="cp-none"?><annotation/>', "is not XML"),
    ],
)
def test_hostile_xml_is_refused(tmp_path, xml, message):
    (tmp_path / "a.xml").write_text(xml)
    with pytest.raises(DataError, match=message):
        read_xml(tmp_path / "a.xml")


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        (
            voc_xml(voc_object("dog", (1, 1, 5, 5)), (60, 40)),
            "the class 'dog' is not listed; there are cat",
        ),
        (
            voc_xml(voc_object("cat", (1, "x", 5, 5)), (60, 40)),
            "bndbox needs xmin, .* got '1, x, 5, 5'",
        ),
        (voc_xml(voc_object("cat", (1, "nan", 5, 5)), (60, 40)), "bndbox needs"),
        (voc_xml(voc_object("cat", (1, "1e300", 5, 5)), (60, 40)), "bndbox needs"),
        (voc_xml("<object><name>cat</name></object>", (60, 40)), "object 1: bndbox needs"),
        (
            voc_xml(voc_object("cat", (1, 1, 5, 5)), ("1e6", "2e6")),
            "the size 1e6x2e6 is out of range",
        ),
        (voc_xml(voc_object("cat", (1, 1, 5, 5)), (-3, 4)), "the size -3x4 is out of range"),
        (BOMB, "a document type .* is not supported"),
    ],
)
def test_wrong_objects_of_voc_are_named(tmp_path, xml, message):
    root = one_voc(tmp_path, xml)
    (root / "labelmap.txt").write_text("background:0,0,0::\ncat:128,0,0::\n")
    found = read_labels("voc", root, "train")
    with pytest.raises(DataError, match=rf"a\.xml.*{message}"):
        found.require_readable()
    items = [p["items"] for p in check_labels("voc", root, ["train"]).plain()["problems"]]
    assert any("a.xml" in item for each in items for item in each)


def test_shapes_that_do_not_belong_to_their_boxes_are_an_error(tmp_path):
    xml = voc_xml(voc_object("cat", (1, 1, 10, 10)) + voc_object("cat", (31, 21, 40, 30)), (60, 40))
    root = one_voc(tmp_path, xml)
    (root / "SegmentationObject").mkdir()
    values = np.zeros((40, 60))
    values[0:10, 0:10], values[20:30, 30:40] = 1, 2
    save_palette(values, root / "SegmentationObject/a.png")
    own = source(read_labels("voc", root, "train")).instances(0)
    assert [mask.sum() for mask in own.masks()] == [100, 100]
    Image.open(root / "SegmentationObject/a.png").convert("RGB").save(
        root / "SegmentationObject/a.png"
    )
    again = source(read_labels("voc", root, "train")).instances(0)
    assert np.array_equal(again.masks(), own.masks())
    save_palette(np.where(values, 3 - values, 0), root / "SegmentationObject/a.png")
    with pytest.raises(DataError, match="the pixels of object 1 are outside its box"):
        read_labels("voc", root, "train").require_readable()
    save_palette(values.T, root / "SegmentationObject/a.png")
    with pytest.raises(DataError, match="is 40x60, its image 60x40"):
        read_labels("voc", root, "train").require_readable()


def test_lists_of_voc_name_files_inside_alone(tmp_path):
    root = one_voc(tmp_path, voc_xml(voc_object("cat", (1, 1, 5, 5)), (60, 40)))
    (root / "ImageSets/Main/train.txt").write_text("a\n../a\n")
    with pytest.raises(DataError, match=r"names \.\./a; names are those of files in"):
        read_labels("voc", root, "train")
    (root / "ImageSets/Main/train.txt").write_text("a\nb\n")
    found = check_labels("voc", root, ["train"]).plain()
    assert any(p["kind"] == "missing images" for p in found["problems"])
    with pytest.raises(DataError, match=r"there is no list .*ImageSets/Main/val.txt"):
        read_labels("voc", root, "val")
    assert len(read_labels("voc", root, "val", whole=True).content["images"]) == 1


def test_images_and_xml_files_beside_each_other_are_read(tmp_path):
    for split, name in (("train", "cat"), ("val", "dog")):
        (tmp_path / split).mkdir()
        Image.new("RGB", (60, 40)).save(tmp_path / split / "a.jpg")
        xml = voc_xml(voc_object(name, (1, 1, 5, 5)), (60, 40))
        (tmp_path / split / "a.xml").write_text(xml)
    for split in ("train", "val"):
        found = source(read_labels("voc", tmp_path, split))
        assert found.classes == ["cat", "dog"]  # of both splits
        assert len(found) == 1


def test_a_devkit_with_one_year_is_found(tmp_path):
    write_voc(tmp_path / "VOCdevkit/VOC2012")
    assert len(read_labels("voc", tmp_path, "val").content["images"]) == 3
    assert detect_format(tmp_path) == "voc"
    (tmp_path / "VOCdevkit/VOC2007").mkdir()
    with pytest.raises(DataError, match=r"holds 2 datasets .VOC2007, VOC2012"):
        read_labels("voc", tmp_path, "val")


def test_masks_of_voc_are_read_by_colour_or_by_value(tmp_path):
    root = write_voc(tmp_path)
    expected = segmentation_on("voc", root).data.val_source(0).mask(0)
    path = next((root / "SegmentationClass").glob("val_0.png"))
    original = Image.open(path).copy()
    original.convert("RGB").save(path)
    assert np.array_equal(segmentation_on("voc", root).data.val_source(0).mask(0), expected)
    Image.fromarray(np.asarray(original)).save(path)  # grey values
    assert np.array_equal(segmentation_on("voc", root).data.val_source(0).mask(0), expected)
    # The same colours under other numbers, as other tools write them.
    turned = Image.fromarray(255 - np.asarray(original), "P")
    turned.putpalette(list(np.reshape(original.getpalette(), (-1, 3))[::-1].ravel()))
    turned.save(path)
    assert np.array_equal(segmentation_on("voc", root).data.val_source(0).mask(0), expected)
    (root / "ImageSets/Segmentation/val.txt").write_text("val_0\nnothing\n")
    with pytest.raises(DataError, match="names nothing, but there is no such image"):
        segmentation_on("voc", root).data.val_source(0)


def test_without_a_label_map_classes_are_those_of_voc(tmp_path):
    entries = mask_entries(tmp_path)
    assert [entry.name for entry in entries[:3]] == ["background", "aeroplane", "bicycle"]
    assert [entry.colour for entry in entries[:3]] == [(0, 0, 0), (128, 0, 0), (0, 128, 0)]
    assert (entries[-1].value, len(entries)) == (255, 22)
    (tmp_path / "labelmap.txt").write_text("# comment\nbackground:0,0,0::\nroad:1,2,300::\n")
    with pytest.raises(DataError, match="line 3: '1,2,300' is not a colour"):
        mask_entries(tmp_path)


def test_torchvision_reads_the_same_from_voc(tmp_path):
    """An independent reader: boxes, classes and masks as torchvision returns them."""
    from torchvision.datasets import VOCDetection, VOCSegmentation

    write_voc(tmp_path / "VOCdevkit/VOC2012")
    for folder in ("JPEGImages", "Annotations"):  # torchvision knows .jpg alone
        for path in (tmp_path / "VOCdevkit/VOC2012" / folder).glob("*.png"):
            path.rename(path.with_suffix(".jpg"))
    theirs = VOCDetection(str(tmp_path), "2012", "val")
    ours = source(read_labels("voc", tmp_path, "val"))
    for i, (_, target) in enumerate(theirs):
        own = ours.instances(i)
        for k, entry in enumerate(target["annotation"]["object"]):
            box = [int(entry["bndbox"][corner]) for corner in ("xmin", "ymin", "xmax", "ymax")]
            assert own.boxes[k].tolist() == [box[0] - 1, box[1] - 1, box[2], box[3]]
            assert ours.classes[own.labels[k]] == entry["name"]
    masks = VOCSegmentation(str(tmp_path), "2012", "val")
    found = segmentation_on("voc", tmp_path).data.val_source(0)
    for i, (_, mask) in enumerate(masks):
        assert np.array_equal(found.mask(i), np.asarray(mask))


def test_a_yolo_folder_given_as_coco_is_recognised(tmp_path):
    root = write_yolo(tmp_path)
    assert detect_format(root) == "yolo"
    recipe = detection_on(
        "coco", root, data__annotations="annotations/{split}.json", data__images="{split}"
    )
    with pytest.raises(
        DataError, match=r"looks like a dataset in the format of yolo: set data.kind=yolo"
    ):
        recipe.data.val_source(0)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of pycocotools
def test_what_is_read_is_json_of_coco(tmp_path):
    from pycocotools.coco import COCO

    root = write_yolo(tmp_path)
    found = read_labels("yolo", root, "val")
    (tmp_path / "val.json").write_text(json.dumps(found.content))
    theirs, ours = COCO(str(tmp_path / "val.json")), source(found)
    for i, identity in enumerate(theirs.getImgIds()):
        entries = theirs.loadAnns(theirs.getAnnIds(identity))
        masks = np.stack([theirs.annToMask(entry) for entry in entries])
        assert np.array_equal(masks, ours.instances(i).masks())
        assert masks.shape[1:] == (SIZE, SIZE)


@pytest.mark.parametrize("task", ["detection", "segmentation"])
@pytest.mark.parametrize("kind", ["yolo", "voc"])
def test_the_check_reads_both_formats(tmp_path, capsys, kind, task):
    root = write_voc(tmp_path) if kind == "voc" else write_yolo(tmp_path)
    words = ["data", "check", str(root), "--kind", kind, "--task", task, "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["good"]
    assert {name: part["images"] for name, part in found["splits"].items()} == {
        "train": 6,
        "val": 3,
    }
    assert found["classes"][-len(CLASSES) :] == list(CLASSES)
    assert main([*words, "--hold-out", "0.5"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "segmentation"], "--task applies to labels; also give --kind"),
        (
            ["--kind", "yolo", "--masks", "m"],
            "--masks does not apply to --kind yolo --task detection",
        ),
        (
            ["--kind", "voc", "--ignore", "3"],
            "--ignore does not apply to --kind voc --task detection",
        ),
        (
            ["--kind", "voc", "--annotations", "a.json"],
            "--annotations does not apply to --kind voc",
        ),
        (
            ["--kind", "voc", "--task", "segmentation", "--images", "i"],
            "--images does not apply to --kind voc, which has a fixed layout",
        ),
    ],
)
def test_options_that_do_not_apply_to_labels_are_refused(tmp_path, capsys, words, message):
    assert main(["data", "check", str(tmp_path), *words]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", ["yolo", "voc"])
def test_labels_are_converted_to_annotations_that_train_the_same(tmp_path, capsys, kind):
    root = tmp_path / "data"
    write_voc(root) if kind == "voc" else write_yolo(root)
    out = tmp_path / "out"
    assert main(["data", "convert", str(root), str(out), "--kind", kind, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val"]["images"] == 3
    for split in SPLITS:
        direct, converted = (
            source(read_labels(kind, root, split)),
            CocoFiles(out / f"{split}.json", root),
        )
        assert (direct.classes, len(direct)) == (converted.classes, len(converted))
        for i in range(len(direct)):
            one, other = direct.instances(i), converted.instances(i)
            assert np.array_equal(one.boxes, other.boxes)
            assert np.array_equal(one.masks(), other.masks())
    (root / ("labelmap.txt" if kind == "voc" else "data.yaml")).write_text("")
    assert main(["data", "convert", str(root), str(tmp_path / "none"), "--kind", kind]) != 0
    assert not (tmp_path / "none").exists()


NUMBERS = st.sampled_from(["0", "1", "2", "3", "-1", "0.5", "0.25", "1.5", "nan", "inf", "1e-9"])


@given(
    st.text("0123456789. -+einfa\t\n\x00", max_size=60)
    | st.binary(max_size=60)
    | st.lists(st.lists(NUMBERS, min_size=5, max_size=9).map(" ".join), max_size=3).map("\n".join)
)
def test_no_label_file_raises_anything_else(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("labels") / "a"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    objects, problems = parse_labels(path, 3, (40, 60))
    assert all(isinstance(p, str) for p in problems)
    for entry in objects:
        assert np.isfinite(entry["bbox"]).all()
        assert entry["category_id"] in (1, 2, 3)
    with suppress(DataError):
        parse_annotation(path, {"cat": 1})


@pytest.mark.slow
@pytest.mark.parametrize("recipe_on", [detection_on, segmentation_on])
@pytest.mark.parametrize("kind", ["yolo", "voc"])
def test_a_run_trains_and_is_evaluated(tmp_path, capsys, kind, recipe_on):
    root = tmp_path / "data"
    write_voc(root) if kind == "voc" else write_yolo(root)
    recipe = recipe_on(kind, root, steps=2, warmup_steps=0, batch=2)
    train(recipe, tmp_path / "run", CPU, quiet=True)
    assert main(["eval", str(tmp_path / "run"), "--json", "--device", "cpu"]) == 0
    figures = json.loads(capsys.readouterr().out)
    rows = figures["per_class"] if "per_class" in figures else figures["single"]["per_class"]
    assert [row["class"] for row in rows][-len(CLASSES) :] == list(CLASSES)
