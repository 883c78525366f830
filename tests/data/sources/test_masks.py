"""Masks of every kind, class lists, and every way in which a folder of them may be wrong."""

import re

import numpy as np
import pytest
from PIL import Image

from pale.data.decoding import image_size
from pale.data.reading import UnreadableImageError
from pale.data.sources.class_list import (
    IGNORED,
    ClassEntry,
    ClassList,
    palette,
    parse_entry,
    read_entries,
)
from pale.data.sources.mask_survey import check_pair
from pale.data.sources.masks import MaskFiles, find_pairs, read_mask

LINES = ["0 sky 10 20 30", "1 road 40 50 60", "2 car 70 80 90", "3 void 0 0 0"]
STREET = ClassList([parse_entry(line) for line in LINES], ignore=(3, 255))
LABELS = np.array([[0, 1, 2], [2, 3, 255]], np.uint8)
EXPECTED = np.array([[0, 1, 2], [2, IGNORED, IGNORED]], np.uint8)


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ("road", ClassEntry(None, "road")),
        ("7 road", ClassEntry(7, "road")),
        ("7 traffic light", ClassEntry(7, "traffic light")),
        ("7 traffic light 1 2 3", ClassEntry(7, "traffic light", (1, 2, 3))),
        ("road #0a0B0c", ClassEntry(None, "road", (10, 11, 12))),
        ("3 lane 2", ClassEntry(3, "lane 2")),
    ],
)
def test_lines_of_a_class_list(line, entry):
    assert parse_entry(line) == entry


@pytest.mark.parametrize(
    ("line", "message"),
    [("road #zz0000", "is not a colour"), ("1 road 1 2 300", "300.*out of range")],
)
def test_wrong_colours_in_a_class_list(line, message):
    with pytest.raises(ValueError, match=message):
        parse_entry(line)


def test_ades_list_is_understood(tmp_path):
    path = tmp_path / "objectInfo150.txt"
    path.write_text(
        "Idx\tRatio\tTrain\tVal\tName\n1\t0.15\t1\t2\twall\n2\t0.1\t3\t4\tbuilding, edifice\n"
    )
    classes = ClassList(read_entries(path), reduce_zero=True)
    assert classes.names == ["wall", "building"]
    labels = classes.from_values(np.array([[0, 1, 2, 255]]), "m")
    assert labels.tolist() == [[IGNORED, 0, 1, IGNORED]]


@pytest.mark.parametrize(
    ("entries", "arguments", "message"),
    [
        (["0 a", "b"], {}, "either every class has a value or none, got 1"),
        (["1 a", "1 b"], {}, "the value 1 twice"),
        (["a"], {}, "a class list needs 2 to 255 classes, got 1"),
        (["0 a", "255 b"], {}, r"got 1 that are not ignored; ignored .*: 255 b"),
        ([f"c{i}" for i in range(300)], {"ignore": ()}, "2 to 255 classes, got 300"),
        (["a 1 2 3", "b 1 2 3"], {}, "two classes the same colour"),
        (["0 a", "70000 b"], {}, "values in a mask are 0 to 65535, got 70000 in the class list"),
        (["a", "b"], {"ignore": (70000,)}, "0 to 65535, got 70000"),
        (["a", "b"], {"ignore": (-1,)}, "0 to 65535, got -1"),
        (["0 a", "1 b", "2 a"], {}, "the name 'a' twice"),
    ],
    ids=[
        "mixed",
        "twice",
        "one",
        "listed but ignored",
        "many",
        "colour",
        "value",
        "ignored",
        "negative",
        "name",
    ],
)
def test_class_lists_that_make_no_sense(entries, arguments, message):
    with pytest.raises(ValueError, match=message):
        ClassList([parse_entry(line) for line in entries], **arguments)


def test_names_without_values_count_from_one_when_zero_is_nothing():
    classes = ClassList([ClassEntry(None, "pet"), ClassEntry(None, "ground")], reduce_zero=True)
    assert classes.from_values(np.array([0, 1, 2]), "m").tolist() == [IGNORED, 0, 1]


def save(kind: str, path) -> None:
    grey = Image.fromarray(LABELS)
    if kind == "grey":
        grey.save(path)
    elif kind == "palette":
        image = Image.frombytes("P", grey.size, LABELS.tobytes())
        image.putpalette([c for colour in palette(256) for c in colour])
        image.save(path)
    elif kind == "16 bits":
        Image.fromarray(LABELS.astype(np.uint16)).save(path)
    elif kind in ("colour", "palette of colours"):
        table = np.zeros((256, 3), np.uint8)
        table[:4] = [(10, 20, 30), (40, 50, 60), (70, 80, 90), (0, 0, 0)]
        image = Image.fromarray(table[LABELS])
        (image if kind == "colour" else image.quantize(8)).save(path)
    elif kind == "colour with alpha":
        save("colour", path)
        Image.open(path).convert("RGBA").save(path)
    elif kind == "grey as RGB":
        grey.convert("RGB").save(path)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("grey", "auto"),
        ("palette", "auto"),
        ("16 bits", "auto"),
        ("colour", "auto"),
        ("colour with alpha", "auto"),
        ("palette of colours", "colour"),
        ("grey as RGB", "index"),
    ],
)
def test_every_kind_of_mask_gives_the_same_labels(kind, rule, tmp_path):
    path = tmp_path / "m.png"
    save(kind, path)
    assert np.array_equal(read_mask(path, STREET, rule), EXPECTED)


def test_one_bit_masks_are_two_classes(tmp_path):
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "m.png")
    classes = ClassList([ClassEntry(None, "ground"), ClassEntry(None, "thing")])
    assert read_mask(tmp_path / "m.png", classes).tolist() == [[1, 0]]


def test_what_is_not_listed_is_an_error_that_names_file_and_value(tmp_path):
    path = tmp_path / "m.png"
    Image.fromarray(np.array([[0, 7]], np.uint8)).save(path)
    with pytest.raises(
        UnreadableImageError, match=r"m\.png: the label 7 is out of range, there are 0 to 2"
    ):
        read_mask(path, STREET)
    Image.fromarray(np.array([[[10, 20, 31]]], np.uint8)).save(path)
    with pytest.raises(
        UnreadableImageError, match=r"m\.png: the colour 10 20 31 is not in the class list"
    ):
        read_mask(path, STREET)
    lenient = ClassList([parse_entry(line) for line in LINES], (3,), unlisted="ignore")
    assert read_mask(path, lenient).tolist() == [[IGNORED]]
    bare = ClassList([ClassEntry(None, "a"), ClassEntry(None, "b")])
    with pytest.raises(
        UnreadableImageError, match="needs a class list with a colour for every class"
    ):
        read_mask(path, bare)
    with pytest.raises(UnreadableImageError, match="its channels differ"):
        read_mask(path, bare, "index")


def test_ignored_classes_may_share_a_name():
    entries = [parse_entry(line) for line in ("0 a", "1 b", "2 void", "3 void")]
    assert ClassList(entries, ignore=(2, 3)).names == ["a", "b"]


def test_class_lists_in_another_encoding_are_named(tmp_path):
    (tmp_path / "classes.txt").write_bytes("Straße\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"classes\.txt is not UTF-8 text"):
        read_entries(tmp_path / "classes.txt")


def test_masks_of_floats_are_read_where_they_are_whole_numbers(tmp_path):
    path = tmp_path / "m.tif"
    Image.fromarray(np.array([[0.0, 1.0, 2.0]], np.float32)).save(path)
    assert read_mask(path, STREET).tolist() == [[0, 1, 2]]
    Image.fromarray(np.array([[0.0, 1.5, 2.0]], np.float32)).save(path)
    with pytest.raises(UnreadableImageError, match=r"m\.tif: the value 1\.5 is not a label"):
        read_mask(path, STREET)


def test_a_mask_of_the_unrotated_image_is_reported(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 12)).save(tmp_path / "a.jpg", exif=exif)
    files = MaskFiles([(tmp_path / "a.jpg", tmp_path / "a.png")], STREET)
    Image.new("L", (20, 12)).save(tmp_path / "a.png")
    assert "is 12x20, its mask 20x12" in check_pair(files, 0).error
    assert (
        "EXIF orientation rotates the image; the mask must be rotated, too"
        in check_pair(files, 0).error
    )
    Image.new("L", (12, 20)).save(tmp_path / "a.png")
    assert check_pair(files, 0).error is None


def test_files_that_are_no_masks(tmp_path):
    with pytest.raises(UnreadableImageError, match="there is no such mask"):
        read_mask(tmp_path / "none.png", STREET)
    (tmp_path / "text.png").write_text("x")
    with pytest.raises(UnreadableImageError, match="cannot be read as a mask"):
        read_mask(tmp_path / "text.png", STREET)
    Image.fromarray(LABELS).save(tmp_path / "lossy.png", format="JPEG")
    with pytest.raises(UnreadableImageError, match="a JPEG does not keep labels"):
        read_mask(tmp_path / "lossy.png", STREET)


@pytest.fixture
def pairs(tmp_path):
    for name in ("b", "a", "deep/c"):
        for folder, suffix in (("images", ".jpg"), ("masks", ".png")):
            path = (tmp_path / folder / name).with_suffix(suffix)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4)).save(path)
    return tmp_path


def test_pairs_are_found_by_name_and_sorted(pairs):
    found = find_pairs(pairs / "images", pairs / "masks")
    assert [image.stem for image, _ in found] == ["a", "b", "c"]
    assert all(image.stem == mask.stem and mask.suffix == ".png" for image, mask in found)


def test_a_list_chooses_pairs(pairs):
    (pairs / "list.txt").write_text("# comment\nb 12 1 2\ndeep/c.jpg\n\n")
    found = find_pairs(pairs / "images", pairs / "masks", pairs / "list.txt")
    assert [image.stem for image, _ in found] == ["b", "c"]
    (pairs / "list.txt").write_text("z\n")
    with pytest.raises(ValueError, match=r"lists z, but there is no such image"):
        find_pairs(pairs / "images", pairs / "masks", pairs / "list.txt")


@pytest.mark.parametrize("names", [None, "list.txt"])
def test_missing_masks_are_said_or_gathered(pairs, names):
    (pairs / "masks/a.png").unlink()
    (pairs / "list.txt").write_text("a\nb\n")
    words = pairs / "images", pairs / "masks", names and pairs / names
    lost = str(pairs / "images/a.jpg")
    with pytest.raises(ValueError, match=rf"{re.escape(lost)} have no mask.*a\.png"):
        find_pairs(*words)
    absent: list[str] = []
    assert find_pairs(*words, absent)[0][0].stem == "b"
    assert absent == [lost]


def test_missing_folders_and_images_raise(pairs):
    with pytest.raises(ValueError, match=r"there is no folder .*with the masks"):
        find_pairs(pairs / "images", pairs / "nowhere")
    (pairs / "empty").mkdir()
    with pytest.raises(ValueError, match="there are no images in"):
        find_pairs(pairs / "empty", pairs / "masks")
    Image.new("RGB", (4, 4)).save(pairs / "images/b.png")
    with pytest.raises(ValueError, match=r"names must differ"):
        find_pairs(pairs / "images", pairs / "masks")


def test_sizes_obey_exif(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 12)).save(tmp_path / "a.jpg", exif=exif)
    assert image_size(tmp_path / "a.jpg") == (12, 20)


def test_colours_are_far_apart():
    colours = palette(255)
    assert len(set(colours)) == 255
    assert colours[:3] == [(128, 0, 0), (0, 128, 0), (128, 128, 0)]
