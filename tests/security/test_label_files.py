"""Label files of YOLO and VOC: small files must not take gigabytes or minutes."""

import time

import numpy as np
import pytest
from PIL import Image
from support.hostile_images import peak_mb
from support.label_files import voc_object, voc_xml

from pale.core.plain_yaml import MAX_VALUES, load_yaml
from pale.data.reading import UnreadableImageError
from pale.data.sources import label_files, voc
from pale.data.sources.label_files import MAX_OBJECTS
from pale.data.sources.label_formats import read_labels
from pale.data.sources.xml_files import MAX_ELEMENTS, read_xml
from pale.data.sources.yolo import YoloMasks
from pale.errors import DataError


def yolo(root, label: str, names: str = "[cat]"):
    for part in ("images", "labels"):
        (root / part / "train").mkdir(parents=True)
    Image.new("RGB", (640, 480)).save(root / "images/train/a.png")
    (root / "labels/train/a.txt").write_text(label)
    (root / "data.yaml").write_text(f"train: images/train\nnames: {names}\n")
    return root


@pytest.mark.timeout(60)
def test_a_yaml_file_of_very_many_values_is_refused_early(tmp_path):
    root = yolo(tmp_path, "", "[" + "a," * 1_000_000 + "b]")  # 14 MB took minutes
    start = time.process_time()
    with pytest.raises(DataError, match=f"more than {MAX_VALUES:,} values"):
        read_labels("yolo", root, "train")
    assert time.process_time() - start < 15
    assert len(load_yaml(b"a: [" + b"x," * 50_000 + b"y]")["a"]) == 50_001


def test_label_files_of_very_many_objects_are_reported_and_not_read(tmp_path):
    line = "0 0 0 1 {:.6f} 1 1\n"
    root = yolo(tmp_path, "".join(line.format(i / 1e6) for i in range(300_000)))
    found = read_labels("yolo", root, "train")
    assert found.content["annotations"] == []
    assert f"300,000 objects, an image may have {MAX_OBJECTS:,}" in found.problems[0]
    with pytest.raises(UnreadableImageError, match="300,000 objects"):
        YoloMasks(root, "train").mask(0)


def test_polygons_that_would_take_minutes_to_draw_are_refused(tmp_path, monkeypatch):
    root = yolo(tmp_path, "0 0 0 1 0 1 1\n0 0 0 .5 0 .5 .5\n")
    assert YoloMasks(root, "train").mask(0).any()
    monkeypatch.setattr(label_files, "MAX_DRAWN", 640 * 480)
    with pytest.raises(UnreadableImageError, match="2 objects in an image of 640x480 are too many"):
        YoloMasks(root, "train").mask(0)


def test_an_xml_file_of_very_many_elements_is_refused(tmp_path):
    (tmp_path / "a.xml").write_text("<annotation>" + "<a/>" * 600_000 + "</annotation>")
    with pytest.raises(DataError, match=f"more than {MAX_ELEMENTS:,} elements"):
        read_xml(tmp_path / "a.xml")


def large_voc(root, count: int, mode: str, objects: int = 1, side: int = 4200):
    for part in ("JPEGImages", "Annotations", "ImageSets/Main", "SegmentationObject"):
        (root / part).mkdir(parents=True)
    size = (side, side)
    for i in range(count):
        Image.new("L", size).save(root / f"JPEGImages/{i}.png")
        Image.new(mode, size).save(root / f"SegmentationObject/{i}.png")
        xml = voc_xml(voc_object("cat", (1, 1, 5, 5)) * objects, size)
        (root / f"Annotations/{i}.xml").write_text(xml)
    (root / "ImageSets/Main/train.txt").write_text("".join(f"{i}\n" for i in range(count)))
    return root


@pytest.mark.slow
def test_large_masks_in_several_threads_take_the_memory_of_one(tmp_path):
    """Six of 18 million pixels as RGB, 300 kB in all, took 4.2 GB; one at a time and in strips, 0.4 GB."""
    root = large_voc(tmp_path, 6, "RGB")

    def read():
        assert read_labels("voc", root, "train", threads=6).problems == []

    assert peak_mb(read) < 600


def test_objects_without_pixels_are_not_searched_one_by_one(tmp_path, monkeypatch):
    root = large_voc(tmp_path, 1, "L", objects=2000, side=300)
    searched = []
    monkeypatch.setattr(voc.rle, "box_of", searched.append)
    assert len(read_labels("voc", root, "train").content["annotations"]) == 2000
    assert searched == []


def test_masks_of_too_much_work_and_of_other_sizes_are_refused(tmp_path, monkeypatch):
    root = large_voc(tmp_path, 1, "L", objects=3, side=300)
    values = np.repeat(np.array([[1], [2], [3]], np.uint8), 300, 1).repeat(100, 0)
    Image.fromarray(values).save(root / "SegmentationObject/0.png")
    monkeypatch.setattr(label_files, "MAX_DRAWN", 2 * 300 * 300)
    problems = read_labels("voc", root, "train").problems
    assert "3 objects in an image of 300x300 are too many to draw, there may be 2" in problems[0]
    Image.new("L", (300, 301)).save(root / "SegmentationObject/0.png")
    decoded = []
    monkeypatch.setattr(voc, "read_stored_image", decoded.append)
    problems = read_labels("voc", root, "train").problems
    assert "is 300x301, its image 300x300" in problems[0]
    assert decoded == []
