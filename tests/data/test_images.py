"""Pictures of every kind that a folder of somebody's own may hold, and every way in which it may be wrong."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pale.data.images import UnreadableImageError, folder, hold_out, list_file, read_image


def picture(w: int = 20, h: int = 12) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (h, w, 3), np.uint8))


def test_plain_rgb_is_unchanged(tmp_path):
    picture().save(tmp_path / "a.png")
    assert np.array_equal(read_image(tmp_path / "a.png"), picture())


def test_grey_has_three_equal_channels(tmp_path):
    picture().convert("L").save(tmp_path / "a.png")
    pixels = np.asarray(read_image(tmp_path / "a.png"))
    assert np.array_equal(pixels, np.asarray(picture().convert("L"))[..., None].repeat(3, 2))


def test_cmyk_is_the_colour_it_was(tmp_path):
    red = Image.new("RGB", (16, 16), (200, 30, 60))
    red.convert("CMYK").save(tmp_path / "a.jpg", quality=100)
    mean = np.asarray(read_image(tmp_path / "a.jpg")).mean((0, 1))
    assert mean == pytest.approx([200, 30, 60], abs=6)


def test_sixteen_bits_keep_their_range(tmp_path):
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(4, 0)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    pixels = np.asarray(read_image(tmp_path / "a.png"))
    assert np.array_equal(pixels[0, :, 0], ramp[0] >> 8)


def test_palette_and_transparency_lie_on_white(tmp_path):
    image = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    image.paste((0, 0, 255, 255), (0, 0, 4, 8))
    image.save(tmp_path / "rgba.png")
    image.quantize(4).save(tmp_path / "palette.png")
    for name in ("rgba.png", "palette.png"):
        pixels = np.asarray(read_image(tmp_path / name))
        assert pixels[0, 0].tolist() == [0, 0, 255]
        assert pixels[0, 7].tolist() == [255, 255, 255]


def test_exif_orientation_is_obeyed(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    picture(20, 12).save(tmp_path / "a.png", exif=exif)
    turned = read_image(tmp_path / "a.png")
    assert turned.size == (12, 20)
    assert np.array_equal(turned, picture(20, 12).transpose(Image.Transpose.ROTATE_270))


def huge_png(path: Path, side: int) -> None:
    """A few bytes that claim to be `side` x `side` pixels."""

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
        picture(64, 64).save(path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "text":
        path.write_text("not a picture")
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
        reason = "no agreed range"
    with pytest.raises(UnreadableImageError, match=reason) as error:
        read_image(path)
    assert str(error.value).startswith(str(path))


@pytest.fixture
def tree(tmp_path) -> Path:
    for name in ("b", "a", "c"):
        (tmp_path / name / "deeper").mkdir(parents=True)
        for i in range(4):
            picture().save(tmp_path / name / f"{i}.png")
        picture().save(tmp_path / name / "deeper" / "5.JPG", "JPEG")
        (tmp_path / name / "notes.txt").write_text("no picture")
    return tmp_path


def test_folders_are_classes_in_sorted_order(tree):
    data = folder(tree)
    assert list(data.classes) == ["a", "b", "c"]
    assert len(data) == 15
    assert data.labels == [0] * 5 + [1] * 5 + [2] * 5
    assert data.image(0).size == (20, 12)
    assert data.name(5).endswith("b/0.png")


def test_validation_keeps_the_numbers_of_the_training_classes(tree):
    data = folder(tree, classes=["a", "b", "c"])
    assert data.labels[-1] == 2
    with pytest.raises(ValueError, match="the training set does not: 'c'"):
        folder(tree, classes=["a", "b"])


def test_missing_empty_and_flat_folders_say_what_is_expected(tree):
    with pytest.raises(ValueError, match=r"no folder .*nowhere; expected are"):
        folder(tree / "nowhere")
    with pytest.raises(ValueError, match="holds no folders"):
        folder(tree / "a" / "deeper")
    (tree / "d").mkdir()
    with pytest.raises(ValueError, match=r"at least one image.* none for 'd'"):
        folder(tree)


def test_list_file_takes_names_or_numbers(tree):
    names, numbers = tree / "names.txt", tree / "numbers.txt"
    names.write_text("# comment\nb/0.png beta\na/0.png alpha\n\nb/1.png beta\n")
    numbers.write_text("b/0.png 1\na/0.png 0\n")
    data = list_file(names, tree)
    assert list(data.classes) == ["alpha", "beta"]
    assert data.labels == [1, 0, 1]
    assert list_file(numbers, tree).labels == [1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no pictures"),
        ("a/0.png\n", "line 1: expected a picture and its class, got 'a/0.png'"),
        ("a/0.png 0\na/1.png 2\n", "none for '1'"),
    ],
    ids=["nothing", "no class", "gap"],
)
def test_bad_list_files_name_the_line(tree, text, message):
    path = tree / "list.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        list_file(path, tree)


def test_list_of_validation_must_fit_the_classes(tree):
    path = tree / "list.txt"
    path.write_text("a/0.png 3\n")
    with pytest.raises(ValueError, match="class 3 is out of range, there are 2"):
        list_file(path, tree, classes=["x", "y"])
    path.write_text("a/0.png zebra\n")
    with pytest.raises(ValueError, match="the training set does not: 'zebra'"):
        list_file(path, tree, classes=["x", "y"])


def test_hold_out_is_a_fair_disjoint_share(tree):
    data = folder(tree)
    kept, held = hold_out(data, 0.2, seed=1)
    assert sorted(kept.indices + held.indices) == list(range(15))
    assert held.labels == [0, 1, 2]
    assert hold_out(data, 0.2, seed=1)[1].indices == held.indices
    with pytest.raises(ValueError, match="leaves one side empty"):
        hold_out(data, 0.01, seed=1)
