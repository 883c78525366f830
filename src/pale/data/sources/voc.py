"""Pascal VOC: objects in XML files, masks as palette images, splits as lists of names.

| folder | content |
| --- | --- |
| JPEGImages | images |
| Annotations | NAME.xml: size, and a name and a box for each object |
| SegmentationClass | NAME.png: classes of the pixels, 255 is not labelled |
| SegmentationObject | NAME.png: number of the object in the XML file, from 1 |
| ImageSets/Main, ImageSets/Segmentation | SPLIT.txt: a name in each line |

One folder per split with images and XML files, as Roboflow writes it, is supported too. Coordinates are VOC's: pixels
count from 1 and `xmax`, `ymax` belong to the box, so that 1, 1, 10, 10 is a box of ten by ten pixels at the corner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np
from numpy.typing import NDArray

from ...core.plain_json import Json
from ...errors import DataError
from .. import rle
from ..decoding import image_size, read_header, read_stored_image
from ..reading import (
    MAX_PIXELS,
    MAX_SIDE,
    SUFFIXES,
    UnreadableImageError,
    display_name,
    open_image,
    open_regular,
)
from .class_list import IGNORED, ClassEntry, Labels, palette, row_strips
from .label_files import (
    MAX_COORDINATE,
    LabelledImage,
    LabelledImages,
    collect_images,
    read_label_text,
    require_drawable,
    too_many_objects,
)
from .masks import MaskFiles, MaskKind, read_mask
from .paths import files_by_stem, list_files
from .xml_files import read_xml

VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
VOID = ClassEntry(IGNORED, "void", (224, 224, 192))
LABEL_MAP = "labelmap.txt"  # of CVAT and Datumaro
NOT_OBJECTS = ("background", "void", "ignored")
LARGE_MASK = 2**24  # pixels
CORNERS = ("xmin", "ymin", "xmax", "ymax")


def looks_like_voc(root: Path) -> bool:
    """Return whether a folder contains VOC's folders."""
    try:
        return any((voc_root(root) / name).is_dir() for name in ("Annotations", "ImageSets"))
    except DataError:
        return True


def voc_root(root: Path) -> Path:
    """Return the folder that contains VOC's folders: the root, or the only folder VOC* in it."""
    if any((root / name).is_dir() for name in ("Annotations", "ImageSets", "SegmentationClass")):
        return root
    years = sorted([*root.glob("VOC2*"), *root.glob("VOCdevkit/VOC2*")])
    if len(years) > 1:
        raise DataError(
            f"{root} holds {len(years)} datasets ({years[0].name}, {years[1].name}, ...); set data.root to one of them"
        )
    return years[0] if years else root


@dataclass(frozen=True)
class VocFiles:
    """Files of a split by name: images, and XML files or masks; `folder` contains the images, under the root."""

    folder: str
    names: Sequence[str]
    images: dict[str, Path]
    labels: dict[str, Path]


def find_files(
    root: Path, split: str, part: str, labels: str, suffixes: tuple[str, ...], whole: bool
) -> VocFiles:
    """Find the files of a split.

    Args:
        root: root of the dataset.
        split: name of the list, with the folder if it is in another one (Segmentation/train).
        part: folder of the list in ImageSets.
        labels: folder of the labels.
        suffixes: suffixes of the labels.
        whole: take all labels if there is no such split.
    """
    folder = root / split
    if not (root / labels).is_dir() and folder.is_dir():  # images and labels beside each other
        images, found = files_by_stem(folder, SUFFIXES), files_by_stem(folder, suffixes)
        return VocFiles(split, sorted(found), images, found)
    images = files_by_stem(root / "JPEGImages", SUFFIXES)
    found = files_by_stem(root / labels, suffixes)
    if not found:
        raise DataError(
            f"there are no labels in {root / labels} ({', '.join(suffixes)}), or in {folder} beside the images"
        )
    lists = [root / "ImageSets" / f"{split}.txt"]
    if "/" not in split:
        lists.insert(0, root / "ImageSets" / part / f"{split}.txt")
    for path in lists:
        if path.is_file():
            words = [line.split() for line in read_label_text(path).splitlines()]
            names = [word[0] for word in words if word]
            return VocFiles("JPEGImages", names, images, found)
    if whole:
        return VocFiles("JPEGImages", sorted(found), images, found)
    raise DataError(
        f"there is no list {lists[0]}, which names the images of the split; name the splits (data.train, data.val), or "
        "validate on a share of all images: data.hold_out=0.2"
    )


def read_voc(root: Path, split: str, whole: bool, threads: int) -> LabelledImages:
    """Read a split: boxes, and shapes if SegmentationObject has a mask.

    An object marked `difficult` becomes a crowd: not used for training, and not counted as a false positive. An image
    without an XML file has no objects.
    """
    root = voc_root(root)
    files = find_files(root, split, "Main", "Annotations", (".xml",), whole)
    classes = object_classes(root, files)
    number = {name: i for i, name in enumerate(classes, start=1)}

    def read(name: str) -> LabelledImage:
        image = files.images.get(name)
        if image is None:
            return LabelledImage({"file_name": f"{files.folder}/{name}.jpg"})  # reported as missing
        entry: Json = {"file_name": str(image.relative_to(root))}
        path = files.labels.get(name)
        if path is None:
            return LabelledImage(entry)
        try:
            size, objects, problems = parse_annotation(path, number)
            if not size:
                w, h = image_size(image)
                size = {"width": w, "height": h}
            mask = root / "SegmentationObject" / f"{name}.png"
            if mask.is_file():
                sides = (size["height"], size["width"])
                if math.prod(sides) > LARGE_MASK:
                    large.submit(add_shapes, objects, mask, sides).result()
                else:
                    add_shapes(objects, mask, sides)
        except (DataError, UnreadableImageError) as error:
            return LabelledImage(entry, (), [str(error)])
        return LabelledImage(entry | size, list(objects.values()), problems)

    if unsafe := [name for name in files.names if ".." in Path(name).parts or name[:1] == "/"]:
        raise DataError(
            f"the list of the split {split} names {display_name(unsafe[0])[:200]}; names are those of files in "
            f"{root / files.folder} without suffix"
        )
    # One thread for all large masks: each takes several bytes per pixel, which a thread keeps for its next one.
    with ThreadPoolExecutor(1) as large:
        return collect_images(root, root, classes, files.names, read, threads)


def object_classes(root: Path, files: VocFiles) -> list[str]:
    """Return the classes of labelmap.txt, or else all names in the XML files of all splits, sorted."""
    if (root / LABEL_MAP).is_file():
        named = [entry.name for entry in read_label_map(root / LABEL_MAP)]
        return [name for name in named if name not in NOT_OBJECTS]
    paths = list(files.labels.values())
    if not (root / "Annotations").is_dir():  # splits are folders, which must have the same classes
        paths = list_files(root, (".xml",))
    found = set()
    for path in paths:
        try:
            found |= {_text(each, "name") for each in read_xml(path).findall("object")}
        except DataError:  # reported with its split
            continue
    found.discard("")
    if not found:
        raise DataError(f"no XML file of {root} has an object with a name; is it the right folder?")
    return sorted(found)


def parse_annotation(
    path: Path, number: dict[str, int]
) -> tuple[dict[str, int], dict[int, Json], list[str]]:
    """Return the size of the image if the file states it, the objects in COCO's structure, and the problems.

    The key of an object is its position in the file, from 1.
    """
    found = read_xml(path)
    objects: dict[int, Json] = {}
    problems = []
    listed = found.findall("object")
    if (problem := too_many_objects(path, len(listed))) is not None:
        return _size(found, path), {}, [problem]
    for place, each in enumerate(listed, start=1):
        where = f"{display_name(path)}, object {place}"
        name, box = _text(each, "name"), each.find("bndbox")
        corners = [_number(box, corner) for corner in CORNERS] if box is not None else [None] * 4
        if name not in number:
            known = f"there are {', '.join(list(number)[:5])}{', ...' if len(number) > 5 else ''}"
            problems.append(f"{where}: the class {name[:80]!r} is not listed; {known}")
            continue
        if any(corner is None for corner in corners):
            values = "" if box is None else ", ".join(_text(box, corner)[:20] for corner in CORNERS)
            problems.append(
                f"{where}: bndbox needs {', '.join(CORNERS)}, numbers up to {MAX_COORDINATE:g}, got {values!r}"
            )
            continue
        left, top, right, bottom = (float(v) for v in corners if v is not None)
        w, h = right - left + 1, bottom - top + 1
        objects[place] = {"category_id": number[name], "bbox": [left - 1, top - 1, w, h]}
        objects[place]["iscrowd"] = int(_text(each, "difficult") not in ("", "0"))
        if objects[place]["iscrowd"]:  # the evaluation of masks needs a shape
            corner = [[left - 1, top - 1, right, top - 1, right, bottom, left - 1, bottom]]
            objects[place] |= {"segmentation": corner, "area": max(0.0, w) * max(0.0, h)}
    return _size(found, path), objects, problems


def _size(root: Element, path: Path) -> dict[str, int]:
    size = root.find("size")
    if size is None:
        return {}
    sides = {s: _number(size, s) for s in ("width", "height")}
    if 0 in sides.values():  # some tools do not know it
        return {}
    found = {side: int(v) for side, v in sides.items() if v is not None and v.is_integer()}
    w, h = found.get("width", 0), found.get("height", 0)
    if not (0 < w <= MAX_SIDE and 0 < h <= MAX_SIDE and w * h <= MAX_PIXELS):
        raise DataError(
            f"{display_name(path)}: the size {_text(size, 'width')[:20]}x{_text(size, 'height')[:20]} is out of "
            f"range; a side has 1 to {MAX_SIDE:,} pixels, an image {MAX_PIXELS:,}: correct or remove it"
        )
    return found


def _text(element: Element, tag: str) -> str:
    return (element.findtext(tag) or "").strip()


def _number(element: Element | None, tag: str) -> float | None:
    try:
        value = float(_text(element, tag)) if element is not None else math.nan
    except ValueError:
        return None
    return value if abs(value) <= MAX_COORDINATE else None  # also excludes NaN


def add_shapes(objects: dict[int, Json], path: Path, size: tuple[int, int]) -> None:
    """Add the shapes of SegmentationObject, whose values are the positions of the objects in the XML file."""
    (w, h), _ = read_header(path)
    if (h, w) != size:
        raise DataError(
            f"{display_name(path)} is {w}x{h}, its image {size[1]}x{size[0]}; both must have one size"
        )
    values = object_numbers(path)
    present = _values_in(values)
    shown = {place: entry for place, entry in objects.items() if place in present}
    require_drawable(path, len(shown), size)
    for place, entry in shown.items():
        mask = values == place
        box = rle.box_of(mask)
        assert box is not None
        left, top, w, h = entry["bbox"]
        if box[0] >= left + w or box[2] <= left or box[1] >= top + h or box[3] <= top:
            raise DataError(
                f"{display_name(path)}: the pixels of object {place} are outside its box; values are the "
                "positions of the objects in the XML file, from 1"
            )
        entry |= {"segmentation": rle.encode(mask.astype(np.uint8)), "area": int(mask.sum())}


def object_numbers(path: Path) -> NDArray[np.generic]:
    """Return the object number of each pixel; colours, which some tools write, are mapped by VOC's palette."""
    image = read_stored_image(path)
    if len(image.getbands()) == 1:
        return np.asarray(image)
    colours = {r << 16 | g << 8 | b: i for i, (r, g, b) in enumerate(palette(255), start=1)}
    found = np.empty((image.height, image.width), np.uint8)
    for rows in row_strips(found):
        strip = image.crop((0, rows.start, image.width, min(rows.stop, image.height)))
        pixels = np.asarray(strip.convert("RGB")).astype(np.int32)
        packed = pixels @ np.array([65536, 256, 1], np.int32)
        known, where = np.unique(packed, return_inverse=True)
        numbers = np.array([colours.get(int(colour), 0) for colour in known], np.uint8)
        found[rows] = numbers[where].reshape(packed.shape)
    return found


def _values_in(pixels: NDArray[np.generic]) -> set[int]:
    return {int(value) for rows in row_strips(pixels) for value in np.unique(pixels[rows])}


def read_label_map(path: Path) -> list[ClassEntry]:
    """Read lines `name:r,g,b:parts:actions` of CVAT and Datumaro; the default colours are those of VOC's palette."""
    entries: list[ClassEntry] = []
    colours = [(0, 0, 0), *palette(255)]
    for number, line in enumerate(read_label_text(path).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, rest = line.partition(":")
        words = rest.partition(":")[0].replace(" ", "").split(",")
        colour = colours[min(len(entries), 255)]
        if words != [""]:
            if len(words) != 3 or not all(
                w.isascii() and w.isdigit() and int(w) < 256 for w in words
            ):
                raise DataError(
                    f"{path}, line {number}: {','.join(words)[:40]!r} is not a colour; a line is name:r,g,b:: with "
                    "values from 0 to 255"
                )
            colour = (int(words[0]), int(words[1]), int(words[2]))
        value = IGNORED if name.strip() in ("void", "ignored") else len(entries)
        entries.append(ClassEntry(value, name.strip(), colour))
    if not entries:
        raise DataError(f"{path} lists no classes; a line is name:r,g,b::")
    return entries


def mask_entries(root: Path) -> list[ClassEntry]:
    """Return the classes of masks: those of labelmap.txt, or VOC's 20, with background and border."""
    root = voc_root(root)
    if (root / LABEL_MAP).is_file():
        return read_label_map(root / LABEL_MAP)
    names = ("background", *VOC_CLASSES)
    colours = [(0, 0, 0), *palette(len(VOC_CLASSES))]
    return [*(ClassEntry(i, n, colours[i]) for i, n in enumerate(names)), VOID]


class VocMasks(MaskFiles):
    """Images with the masks of SegmentationClass.

    A palette image is read by its colours if the class list has them, because tools number classes differently; a grey
    image is read by its values.
    """

    def mask(self, index: int) -> Labels:
        """Read a mask."""
        path = self.pairs[index][1]
        kind: MaskKind = self.kind
        if kind == "auto" and self.classes.coloured and _mode(path) == "P":
            kind = "colour"
        return read_mask(path, self.classes, kind)


def _mode(path: Path) -> str:
    """Return the mode of an image; "" if it cannot be read, which is reported when it is decoded."""
    try:
        with open_regular(path) as file, open_image(file) as image:
            return str(image.mode)
    except (OSError, ValueError):
        return ""


def mask_pairs(
    root: Path, split: str, whole: bool = False, absent: list[str] | None = None
) -> list[tuple[Path, Path]]:
    """Return images and masks of a split; images without a mask are an error, or are added to `absent`."""
    root = voc_root(root)
    files = find_files(root, split, "Segmentation", "SegmentationClass", (".png",), whole)
    if missing := [name for name in files.names if name not in files.images]:
        raise DataError(
            f"the split {split} names {display_name(missing[0])[:200]}, but there is no such image in "
            f"{root / 'JPEGImages'}"
        )
    bare = [name for name in files.names if name not in files.labels]
    if absent is not None:
        absent += [display_name(files.images[name]) for name in bare]
    elif bare:
        raise DataError(
            f"{len(bare)} images of the split {split} have no mask in {root / 'SegmentationClass'}, such as "
            f"{display_name(bare[0])}; draw them, or remove the names from the list"
        )
    pairs = [(files.images[n], files.labels[n]) for n in files.names if n in files.labels]
    if not pairs:
        raise DataError(f"the split {split} of {root} has no masks; is it the right dataset?")
    return pairs
