"""Images with masks, from folders or generated scenes.

A mask is read as uint8 labels: 0 to n - 1 are classes, 255 (`IGNORED`) is unlabelled. The `ClassList` maps
all that a file may contain (palette, grey, 16 bits, colours, a void class, labels that start at 1) to
these labels; other values raise an error that names the file.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..decoding import read_image, read_stored_image
from ..reading import (
    SUFFIXES,
    UnreadableImageError,
    display_name,
    read_text,
)
from .class_list import ClassEntry, ClassList, Labels, row_strips
from .paths import files_by_stem
from .scenes import CLASSES as SHAPES
from .scenes import SceneSource

MASK_SUFFIXES = (".png", ".bmp", ".gif", ".tif", ".tiff")  # lossless formats
MaskKind = Literal["auto", "index", "colour"]


def read_mask(path: str | os.PathLike[str], classes: ClassList, kind: MaskKind = "auto") -> Labels:
    """Read the labels of a mask file, (h, w).

    Args:
        path: palette, grey or colour image in a lossless format.
        classes: maps values or colours to labels.
        kind: "index": palette indices or grey values are labels; "colour": colours are, including those of a palette;
            "auto": colours if the file has three channels or more.
    """
    name = display_name(path)
    image = read_stored_image(path)
    if image.format == "JPEG":
        raise UnreadableImageError(
            f"{name}: a JPEG does not keep labels exactly; save masks as PNG"
        )
    colour = kind == "colour" or (kind == "auto" and len(image.getbands()) >= 3)
    if colour:
        return classes.from_colours(np.asarray(image.convert("RGB")), name)
    pixels = np.asarray(image)
    if pixels.ndim == 3:
        if len(image.getbands()) >= 3 and any(
            (pixels[rows, :, :3] != pixels[rows, :, :1]).any() for rows in row_strips(pixels)
        ):
            raise UnreadableImageError(
                f"{name}: mask_kind=index needs one value per pixel, but its channels differ; "
                "set data.mask_kind=colour"
            )
        pixels = pixels[..., 0]
    if pixels.dtype.kind == "f":
        _require_integers(pixels, name)
    return classes.from_values(pixels, name)


def _require_integers(pixels: NDArray[np.floating], name: str) -> None:
    for rows in row_strips(pixels):
        part = pixels[rows]
        # NaN is not equal to itself.
        if (wrong := ~((part == np.rint(part)) & np.isfinite(part))).any():
            raise UnreadableImageError(
                f"{name}: the value {part[wrong][0]:g} is not a label; labels are integers, save the mask with 8 or 16 "
                "bits"
            )


class MaskSource(Protocol):
    """Images with masks, by index."""

    classes: ClassList

    def __len__(self) -> int: ...

    def image(self, index: int) -> Image.Image:
        """Return an image as RGB."""

    def mask(self, index: int) -> Labels:
        """Return the labels of an image, (h, w)."""

    def name(self, index: int) -> str:
        """Return the origin of an image, for messages."""


class MaskFiles:
    """Images and masks in files."""

    def __init__(
        self, pairs: Sequence[tuple[Path, Path]], classes: ClassList, kind: MaskKind = "auto"
    ) -> None:
        self.pairs, self.classes, self.kind = pairs, classes, kind

    def with_pairs(self, pairs: Sequence[tuple[Path, Path]]) -> Self:
        """Return a copy with other files."""
        other = copy.copy(self)
        other.pairs = pairs
        return other

    def __len__(self) -> int:
        return len(self.pairs)

    def image(self, index: int) -> Image.Image:
        """Return an image as RGB."""
        return read_image(self.pairs[index][0])

    def mask(self, index: int) -> Labels:
        """Return the labels of an image."""
        return read_mask(self.pairs[index][1], self.classes, self.kind)

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return display_name(self.pairs[index][0])


class SceneMasks(SceneSource):
    """Scenes with their semantic masks."""

    classes = ClassList([ClassEntry(None, name) for name in ("background", *SHAPES)])

    def mask(self, index: int) -> Labels:
        """Draw a scene and return its labels."""
        return self.scenes[index].mask

    def image_and_mask(self, index: int) -> tuple[Image.Image, Labels]:
        """Draw a scene once and return image and labels."""
        scene = self.scenes[index]
        return Image.fromarray(scene.image), scene.mask


def find_pairs(
    images: Path, masks: Path, names: Path | None = None, absent: list[str] | None = None
) -> list[tuple[Path, Path]]:
    """Return the images in `images` with the masks of the same relative path in `masks`; suffixes may differ.

    Args:
        images: folder of images.
        masks: folder of masks.
        names: file whose lines start with paths below `images`, with or without suffix; only these are used.
        absent: the images without a mask are added to this list; if None, they raise an error.
    """
    for folder, content in ((images, "images"), (masks, "masks")):
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder} with the {content}")
    image_paths = files_by_stem(images, SUFFIXES)
    mask_paths = files_by_stem(masks, MASK_SUFFIXES)
    stems = list(image_paths) if names is None else _listed_stems(names, images, image_paths)
    if not stems:
        raise ValueError(f"there are no images in {images} ({', '.join(SUFFIXES)})")
    missing = [stem for stem in stems if stem not in mask_paths]
    if absent is not None:
        absent += [display_name(image_paths[stem]) for stem in missing]
    elif missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{image_paths[missing[0]]}{more} have no mask in {masks}; expected is "
            f"{masks / missing[0]}.png"
        )
    return [(image_paths[stem], mask_paths[stem]) for stem in stems if stem in mask_paths]


def _listed_stems(names: Path, images: Path, image_paths: dict[str, Path]) -> list[str]:
    """Return the paths without suffix that a list file names."""
    if not names.is_file():
        raise ValueError(f"there is no list {names}; its lines start with the name of an image")
    lines = [line.split() for line in read_text(names).splitlines()]
    listed = [words[0] for words in lines if words and not words[0].startswith("#")]
    stems = [name if name in image_paths else os.path.splitext(name)[0] for name in listed]
    if unknown := [stem for stem in stems if stem not in image_paths]:
        raise ValueError(f"{names} lists {unknown[0]}, but there is no such image in {images}")
    return stems
