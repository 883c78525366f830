"""Reading what may be hostile: formats that start programs, FIFOs and devices, sizes that no memory holds."""

import ast
import io
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.hostile_images import EPS, peak_mb, png

import pale
from pale.data.decoding import image_size, read_image
from pale.data.reading import (
    MAX_PIXELS,
    MAX_SIDE,
    TooLargeError,
    UnreadableImageError,
    display_name,
    distinct_names,
    open_image,
    open_regular,
    read_bytes,
    require_distinct_names,
)
from pale.data.sources.class_list import ClassEntry, ClassList
from pale.data.sources.masks import read_mask
from pale.data.sources.paths import output_names

SOURCES = sorted(Path(pale.__file__).parent.rglob("*.py"))
CLASSES = ClassList([ClassEntry(0, "a"), ClassEntry(1, "b")])


def opens_images(tree: ast.AST) -> list[int]:
    """Lines that call Pillow's own opening, under whatever name it was imported."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("PIL"):
            found += [node.lineno for name in node.names if name.name in ("open", "ImageFile")]
        if isinstance(node, ast.Attribute) and node.attr == "open":
            holder = node.value
            if isinstance(holder, ast.Attribute):  # PIL.Image.open
                holder = ast.Name(holder.attr)
            if isinstance(holder, ast.Name) and holder.id == "Image":
                found.append(node.lineno)
    return found


def test_one_place_of_the_package_opens_images():
    found = {p.name: lines for p in SOURCES if (lines := opens_images(ast.parse(p.read_text())))}
    reading = [len(lines) for name, lines in found.items() if name == "reading.py"]
    assert set(found) == {"reading.py"}
    assert reading == [1]


@pytest.mark.parametrize(
    "code", ["from PIL import Image\nImage.open(f)", "import PIL.Image\nPIL.Image.open(f)"]
)
def test_the_search_for_other_places_would_find_them(code):
    assert opens_images(ast.parse(code)) == [2]


def test_pillow_by_itself_would_start_ghostscript(ghostscript, tmp_path):
    (tmp_path / "x.jpg").write_bytes(EPS)
    with (
        pytest.raises(OSError, match="cannot"),
        Image.open(tmp_path / "x.jpg") as image,
    ):
        image.load()
    assert ghostscript.exists()


@pytest.mark.parametrize("read", [read_image, image_size, lambda p: read_mask(p, CLASSES)])
def test_postscript_under_another_name_starts_nothing(ghostscript, tmp_path, read):
    (tmp_path / "x.png").write_bytes(EPS)
    with pytest.raises(UnreadableImageError, match=r"x\.png: cannot be read as .*unknown format"):
        read(tmp_path / "x.png")
    assert not ghostscript.exists()


@pytest.mark.parametrize("read", [read_image, image_size, lambda p: read_mask(p, CLASSES)])
def test_an_empty_file_is_named_as_such(tmp_path, read):
    (tmp_path / "x.png").touch()
    with pytest.raises(
        UnreadableImageError, match=r"x\.png: cannot be read as .*the file is empty"
    ):
        read(tmp_path / "x.png")


@pytest.mark.parametrize("format", ["PPM", "TGA", "PCX", "ICO", "EPS", "PDF", "SGI", "DDS"])
def test_formats_beside_the_named_ones_are_not_read(tmp_path, format):
    Image.new("RGB", (32, 32)).save(tmp_path / "x.png", format)
    with pytest.raises(
        UnreadableImageError, match="supported are JPEG, PNG, WebP, GIF, BMP and TIFF"
    ):
        read_image(tmp_path / "x.png")


def special(path: Path, kind: str) -> Path:
    """Something that is not a regular file."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            before = Path.cwd()
            os.chdir(path.parent)  # names of sockets are short
            try:
                server.bind(path.name)
            finally:
                os.chdir(before)
    else:
        path.mkdir()
    return path


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["FIFO", "device", "socket", "folder"])
@pytest.mark.parametrize(
    "read", [read_image, image_size, lambda p: read_mask(p, CLASSES)], ids=["image", "size", "mask"]
)
def test_what_is_no_regular_file_is_named_and_never_waited_for(tmp_path, kind, read):
    with pytest.raises(
        UnreadableImageError, match=rf"x\.png: cannot be read \(a {kind}, not a reg"
    ):
        read(special(tmp_path / "x.png", kind))


def test_a_link_to_a_regular_file_is_read(tmp_path):
    Image.new("RGB", (4, 3)).save(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to("a.png")
    assert read_image(tmp_path / "b.png").size == (4, 3)


@pytest.mark.timeout(20)
def test_a_file_that_becomes_a_fifo_after_it_was_looked_at_is_not_waited_for(tmp_path, monkeypatch):
    regular = os.stat(__file__)
    os.mkfifo(tmp_path / "x")
    monkeypatch.setattr(os, "stat", lambda path: regular)
    with pytest.raises(OSError, match="a FIFO, not a regular file"):
        open_regular(tmp_path / "x")


@pytest.mark.parametrize("name", ["a\0b.png", "a\ud800.png"], ids=["null byte", "surrogate"])
def test_names_that_no_file_can_have_are_unreadable(tmp_path, name):
    with pytest.raises(UnreadableImageError, match="invalid file name"):
        read_image(str(tmp_path / name))


def test_a_file_larger_than_the_bound_is_not_read(tmp_path):
    with open(tmp_path / "sparse.jpg", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="1,099,511,627,776 bytes, the limit is 2,147,483,648"):
        read_bytes(tmp_path / "sparse.jpg")


@pytest.mark.parametrize(
    ("width", "height", "words"),
    [
        (2_000_000, 1, f"a side of more than {MAX_SIDE:,} pixels \\(2000000x1\\)"),
        (1, 65_536, f"a side of more than {MAX_SIDE:,}"),
        (15_000, 15_000, f"more than {MAX_PIXELS:,} pixels"),
        (65_000, 65_000, f"more than {MAX_PIXELS:,} pixels"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_sizes_beyond_the_bounds_are_refused_before_memory_is_taken(tmp_path, width, height, words):
    path = png(tmp_path / "x.png", width, height, pixels=False)

    def read():
        with pytest.raises(UnreadableImageError, match=words):
            read_image(path)
        with pytest.raises(UnreadableImageError, match=words):
            read_mask(path, CLASSES)

    assert peak_mb(read) < 20


def tiled_tiff(tile: tuple[int, int]) -> bytes:
    """A TIFF of 16x16 pixels that says its tiles are of this size, deflated zeros."""
    packer = zlib_zeros(min(tile[0] * tile[1], 2**24))
    entries = [
        (256, 3, 16),
        (257, 3, 16),
        (258, 3, 8),
        (259, 3, 8),
        (262, 3, 1),
        (277, 3, 1),
        (322, 4, tile[0]),
        (323, 4, tile[1]),
        (324, 4, 8),
        (325, 4, len(packer)),
    ]
    directory = struct.pack("<H", len(entries))
    directory += b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"II*\0" + struct.pack("<I", 8 + len(packer)) + packer + directory + bytes(4)


def zlib_zeros(count: int) -> bytes:
    import zlib

    packer = zlib.compressobj(9)
    parts = [packer.compress(bytes(2**20)) for _ in range(-(-count // 2**20))]
    return b"".join([*parts, packer.flush()])


def test_a_tiff_with_huge_tiles_is_refused_before_they_are_decoded(tmp_path):
    (tmp_path / "x.tif").write_bytes(tiled_tiff((32_768, 16_384)))

    def read():
        with pytest.raises(UnreadableImageError, match=r"more than .* pixels \(32768x16384\)"):
            read_image(tmp_path / "x.tif")

    assert peak_mb(read) < 50
    (tmp_path / "y.tif").write_bytes(tiled_tiff((16, 16)))
    assert read_image(tmp_path / "y.tif").size == (16, 16)


def test_entries_of_exif_that_share_their_bytes_take_no_more_than_the_file(tmp_path):
    count, shared = 5000, 400_000
    entries = [struct.pack("<HHII", 40_000 + i, 1, shared, 0) for i in range(count)]
    exif = b"II*\0" + struct.pack("<IH", 8, count) + b"".join(entries) + bytes(4)
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "PNG", exif=b"Exif\0\0" + exif + bytes(shared))
    (tmp_path / "x.png").write_bytes(content.getvalue())

    def read():
        with suppress(UnreadableImageError):  # warnings about such entries are errors in tests
            read_image(tmp_path / "x.png")

    assert peak_mb(read) < 50  # of 2 GB


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("bits", "colour"), [(8, 2), (8, 6), (16, 0), (1, 3)])
def test_the_largest_image_takes_no_more_than_two_copies_of_itself(tmp_path, bits, colour):
    path = png(tmp_path / "x.png", 13_300, 13_400, bits, colour)
    rgb = 4 * 13_300 * 13_400 / 2**20  # Pillow holds RGB in four bytes
    assert path.stat().st_size < 2_000_000
    assert peak_mb(read_image, path, limit_gb=6) < 2.1 * rgb + 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_largest_mask_takes_some_bytes_a_pixel(tmp_path):
    path = png(tmp_path / "x.png", 13_300, 13_400, 8, 0)
    pixels = 13_300 * 13_400 / 2**20
    assert peak_mb(read_mask, path, CLASSES, limit_gb=6) < 4 * pixels + 200


def test_conversion_by_strips_gives_what_conversion_in_one_piece_does(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    clear = Image.fromarray(rng.integers(0, 256, (31, 23, 4), np.uint8), "RGBA")
    deep = Image.fromarray(rng.integers(0, 65536, (31, 23)).astype(np.uint16))
    palette = clear.quantize(16)
    for number, image in enumerate((clear, clear.convert("LA"), deep, palette)):
        image.save(tmp_path / f"{number}.png")
    whole = [np.asarray(read_image(tmp_path / f"{i}.png")) for i in range(4)]
    monkeypatch.setattr("pale.data.decoding.STRIP_PIXELS", 100)
    for number, pixels in enumerate(whole):
        assert np.array_equal(read_image(tmp_path / f"{number}.png"), pixels)


def test_masks_are_looked_up_by_strips_as_in_one_piece(tmp_path, monkeypatch):
    classes = ClassList(
        [ClassEntry(0, "a", (0, 0, 0)), ClassEntry(7, "b", (9, 9, 9))], unlisted="ignore"
    )
    values = np.random.default_rng(0).choice(np.array([0, 7, 255, 3], np.uint8), (29, 17))
    whole = classes.from_values(values, "m"), classes.from_colours(np.stack([values] * 3, -1), "m")
    monkeypatch.setattr("pale.data.sources.class_list.STRIP_VALUES", 50)
    strips = classes.from_values(values, "m"), classes.from_colours(np.stack([values] * 3, -1), "m")
    for one, two in zip(whole, strips, strict=True):
        assert np.array_equal(one, two)
    strict = ClassList([ClassEntry(0, "a"), ClassEntry(7, "b")])
    with pytest.raises(UnreadableImageError, match="the label 3 is out of range"):
        strict.from_values(values, "m")


def test_the_bound_may_be_lower_but_the_formats_are_the_same():
    content = io.BytesIO()
    Image.new("RGB", (30, 30)).save(content, "PNG")
    with pytest.raises(TooLargeError, match=r"more than 899 pixels \(30x30\)"):
        open_image(content, 899)
    assert open_image(content, 900).size == (30, 30)


def test_file_names_become_valid_unicode():
    assert display_name("a/ä.jpg") == "a/ä.jpg"
    assert display_name(os.fsdecode(b"a/\xff\xc3.jpg")) == "a/\\xff\\xc3.jpg"
    assert display_name("a\ud800") == "a\\ud800"
    for name in (b"\xff", b"\xed\xa0\x80"):
        display_name(os.fsdecode(name)).encode()


def test_equal_class_names_get_the_number_of_their_class():
    names = ["crane", "cat", "crane", "crane (class 2)", "a\udcff"]
    found = distinct_names(names)
    assert found == ["crane (class 0)", "cat", "crane (class 2)'", "crane (class 2)", "a\\udcff"]
    assert len(set(found)) == len(found)
    with pytest.raises(ValueError, match="x has the name 'crane' twice"):
        require_distinct_names(names, "x")


def test_names_of_results_differ_and_keep_the_suffix_where_two_would_be_one():
    names = [Path(n) for n in ("a.jpg", "a.png", "b.jpg", "sub/a.jpg", "a.jpg.png", "a.jpg")]
    assert output_names(names) == ["a.jpg-2", "a.png", "b", "sub/a", "a.jpg", "a.jpg-3"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("same", [False, True], ids=["all in pairs", "all the same"])
def test_a_hundred_thousand_names_take_a_second_or_two(same):
    import time

    names = [
        Path("a.jpg" if same else f"{i // 2}.{'jpg' if i % 2 else 'png'}") for i in range(10**5)
    ]
    began = time.process_time()
    found = output_names(names)
    assert time.process_time() - began < 2
    assert len(set(found)) == 10**5
