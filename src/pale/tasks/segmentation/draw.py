"""Draw the classes of pixels over an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ...core.fonts import prepare_labels
from ...data.sources.class_list import IGNORED, Colour, Labels

INK, PAPER = (38, 42, 51), (250, 250, 247)
MAX_LEGEND = 12  # classes in a legend
LEGEND_SHARE = 0.5  # of the width and height of an image, at most
STRIP = 2**18  # pixels that are processed at a time


def pixel_counts(labels: Labels, classes: int) -> NDArray[np.int64]:
    """Count the pixels of each class, in strips."""
    counts = np.zeros(256, np.int64)
    for rows in _strips(*labels.shape):
        counts += np.bincount(labels[rows].ravel(), minlength=256)
    return counts[:classes]


def indexed(labels: Labels, colours: Sequence[Colour]) -> Image.Image:
    """Return a palette image: pixels are class numbers, shown in their colours; ignored ones are white."""
    h, w = labels.shape
    image = Image.frombytes("P", (w, h), np.ascontiguousarray(labels).tobytes())
    table = [0] * 768
    for i, colour in enumerate(colours):
        table[3 * i : 3 * i + 3] = colour
    table[765:] = [255, 255, 255]
    image.putpalette(table)
    return image


def overlay(
    image: Image.Image, labels: Labels, colours: Sequence[Colour], strength: float = 0.55
) -> Image.Image:
    """Blend the image with the colours of its classes; labels of another size are resized."""
    mask = Image.fromarray(labels)
    if mask.size != image.size:
        mask = mask.resize(image.size, Image.Resampling.NEAREST)
    table = np.zeros((256, 3), np.float32)
    table[: len(colours)] = colours
    mixed = Image.new("RGB", image.size)
    for rows in _strips(
        image.height, image.width
    ):  # as floats the whole image takes many times its memory
        box = (0, rows.start, image.width, rows.stop)
        index, pixels = np.asarray(mask.crop(box)), np.asarray(image.crop(box).convert("RGB"))
        both = (1 - strength) * pixels + strength * table[index]
        known = (index != IGNORED)[..., None]
        mixed.paste(Image.fromarray(np.where(known, both.round(), pixels).astype(np.uint8)), box)
    return mixed


def _strips(h: int, w: int) -> Iterator[slice]:
    """Yield the rows of an array that are processed at a time."""
    rows = max(1, STRIP // max(1, w))
    for top in range(0, h, rows):
        yield slice(top, min(top + rows, h))


def add_legend(image: Image.Image, colours: Mapping[str, Colour]) -> Image.Image:
    """Write the names of classes with their colours into the upper left corner, as many as fit; changes the image.

    Args:
        image: RGB.
        colours: by class name, the largest class first.
    """
    w, h = image.size
    line = max(12, min(w, h) // 22)
    shown = list(colours.items())[: min(MAX_LEGEND, int(LEGEND_SHARE * h / line))]
    font, texts = prepare_labels([name for name, _ in shown], round(0.75 * line))
    widest = max(map(font.getlength, texts), default=w)
    width = round(1.6 * line + min(widest, LEGEND_SHARE * w))
    if not shown or width > w:
        return image
    panel = Image.new("RGB", (width, line * len(shown)), PAPER)
    pen = ImageDraw.Draw(panel)
    for i, ((_, colour), text) in enumerate(zip(shown, texts, strict=True)):
        top = i * line
        pen.rectangle((0.2 * line, top + 0.2 * line, line, top + 0.8 * line), colour)
        pen.text((1.3 * line, top + 0.05 * line), text, INK, font)
    image.paste(panel, (0, 0))
    return image
