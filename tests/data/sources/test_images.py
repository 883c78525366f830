"""Decoding of image files of many kinds, and reading of folders and list files, including invalid ones."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pale.cli.main import main
from pale.data.decoding import read_image
from pale.data.reading import UnreadableImageError
from pale.data.sources.images import hold_out, read_folder, read_list


def random_image(w: int = 20, h: int = 12) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (h, w, 3), np.uint8))


def test_plain_rgb_is_unchanged(tmp_path):
    random_image().save(tmp_path / "a.png")
    assert np.array_equal(read_image(tmp_path / "a.png"), random_image())


def test_grey_has_three_equal_channels(tmp_path):
    random_image().convert("L").save(tmp_path / "a.png")
    pixels = np.asarray(read_image(tmp_path / "a.png"))
    assert np.array_equal(pixels, np.asarray(random_image().convert("L"))[..., None].repeat(3, 2))


def test_cmyk_keeps_its_colours(tmp_path):
    red = Image.new("RGB", (16, 16), (200, 30, 60))
    red.convert("CMYK").save(tmp_path / "a.jpg", quality=100)
    mean = np.asarray(read_image(tmp_path / "a.jpg")).mean((0, 1))
    assert mean == pytest.approx([200, 30, 60], abs=6)


def test_sixteen_bits_keep_their_range(tmp_path):
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(4, 0)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    pixels = np.asarray(read_image(tmp_path / "a.png"))
    assert np.array_equal(pixels[0, :, 0], ramp[0] >> 8)


def test_transparent_images_are_blended_on_white(tmp_path):
    image = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    image.paste((0, 0, 255, 255), (0, 0, 4, 8))
    image.save(tmp_path / "rgba.png")
    image.quantize(4).save(tmp_path / "palette.png")
    for name in ("rgba.png", "palette.png"):
        pixels = np.asarray(read_image(tmp_path / name))
        assert pixels[0, 0].tolist() == [0, 0, 255]
        assert pixels[0, 7].tolist() == [255, 255, 255]


def test_exif_orientation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    random_image(20, 12).save(tmp_path / "a.png", exif=exif)
    upright = read_image(tmp_path / "a.png")
    assert upright.size == (12, 20)
    assert np.array_equal(upright, random_image(20, 12).transpose(Image.Transpose.ROTATE_270))


def huge_png(path: Path, side: int) -> None:
    """Write a tiny file whose header states `side` x `side` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


@pytest.mark.parametrize("kind", ["truncated", "text", "empty", "missing", "huge", "float"])
def test_bad_files_are_named_with_the_reason(tmp_path, kind):
    path = tmp_path / f"{kind}.png"
    reason = "cannot be read as an image"
    if kind == "truncated":
        random_image(64, 64).save(path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "text":
        path.write_text("not an image")
    elif kind == "empty":
        path.touch()
    elif kind == "missing":
        reason = "no such file"
    elif kind == "huge":
        huge_png(path, 30000)
        reason = "more than 178,956,970 pixels"
    else:
        path = path.with_suffix(".tif")
        Image.fromarray(np.zeros((4, 4), np.float32)).save(path)
        reason = "no defined range"
    with pytest.raises(UnreadableImageError, match=reason) as error:
        read_image(path)
    assert str(error.value).startswith(str(path))


@pytest.fixture
def tree(tmp_path) -> Path:
    for name in ("b", "a", "c"):
        (tmp_path / name / "deeper").mkdir(parents=True)
        for i in range(4):
            random_image().save(tmp_path / name / f"{i}.png")
        random_image().save(tmp_path / name / "deeper" / "5.JPG", "JPEG")
        (tmp_path / name / "notes.txt").write_text("not an image")
    return tmp_path


def test_folders_are_classes_in_sorted_order(tree):
    data = read_folder(tree)
    assert list(data.classes) == ["a", "b", "c"]
    assert len(data) == 15
    assert data.labels == [0] * 5 + [1] * 5 + [2] * 5
    assert data.image(0).size == (20, 12)
    assert data.name(5).endswith("b/0.png")


def test_validation_keeps_the_numbers_of_the_training_classes(tree):
    data = read_folder(tree, classes=["a", "b", "c"])
    assert data.labels[-1] == 2
    with pytest.raises(ValueError, match="the training set does not have: 'c'"):
        read_folder(tree, classes=["a", "b"])


def test_missing_and_empty_folders_raise_with_the_expected_layout(tree):
    with pytest.raises(ValueError, match=r"no folder .*nowhere; expected are"):
        read_folder(tree / "nowhere")
    with pytest.raises(ValueError, match="contains no folders"):
        read_folder(tree / "a" / "deeper")
    (tree / "d").mkdir()
    with pytest.raises(ValueError, match=r"at least one image.* none for 'd'"):
        read_folder(tree)


def test_list_files_have_names_or_numbers(tree):
    names, numbers = tree / "names.txt", tree / "numbers.txt"
    names.write_text("# comment\nb/0.png beta\na/0.png alpha\n\nb/1.png beta\n")
    numbers.write_text("b/0.png 1\na/0.png 0\n")
    data = read_list(names, tree)
    assert list(data.classes) == ["alpha", "beta"]
    assert data.labels == [1, 0, 1]
    assert read_list(numbers, tree).labels == [1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no images"),
        ("a/0.png\n", "line 1: expected an image and its class, got 'a/0.png'"),
        ("a/0.png 0\na/1.png 2\n", "none for '1'"),
    ],
    ids=["nothing", "no class", "gap"],
)
def test_bad_list_files_name_the_line(tree, text, message):
    path = tree / "list.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_list(path, tree)


def test_the_validation_list_must_fit_the_classes(tree):
    path = tree / "list.txt"
    path.write_text("a/0.png 3\n")
    with pytest.raises(ValueError, match="class 3 is out of range, there are 2"):
        read_list(path, tree, classes=["x", "y"])
    path.write_text("a/0.png zebra\n")
    with pytest.raises(ValueError, match="the training set does not have: 'zebra'"):
        read_list(path, tree, classes=["x", "y"])


def test_hold_out_is_a_disjoint_share_of_each_class(tree):
    data = read_folder(tree)
    kept, held = hold_out(data, 0.2, seed=1)
    assert sorted(kept.indices + held.indices) == list(range(15))
    assert held.labels == [0, 1, 2]
    assert hold_out(data, 0.2, seed=1)[1].indices == held.indices
    with pytest.raises(ValueError, match="leaves one side empty"):
        hold_out(data, 0.01, seed=1)


def test_links_that_lead_to_themselves_do_not_stop_a_dataset(tmp_path, capsys):
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / name / "0.png")
    for name in ("loop", "train/loop.png", "train/a/loop"):
        (tmp_path / name).symlink_to(Path(name).name)
    assert read_folder(tmp_path / "train").classes == ["a", "b"]
    main(["data", "check", str(tmp_path), "--workers", "1"])
    captured = capsys.readouterr()
    assert "Too many levels" not in captured.err
    assert "train" in captured.out
