"""Draw objects on an image: masks, boxes, names and scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from ...core.fonts import Font, prepare_labels
from ...data import rle
from ...data.sources.class_list import Colour, palette
from ..prediction import Json

STRENGTH = 0.45  # opacity of the colour
STRIP = 2**18  # pixels that are coloured at a time
MAX_COORDINATE = 1e7  # of a box from a file


def overlay(
    image: Image.Image,
    found: Sequence[Json],
    names: Sequence[str],
    categories: Sequence[int],
) -> Image.Image:
    """Return the image with masks and boxes, names and, if there are any, scores.

    Args:
        image: image of the size that the objects refer to.
        found: COCO's annotations or results.
        names: names of the classes.
        categories: ids of the classes.
    """
    canvas = image.copy() if image.mode == "RGB" else image.convert("RGB")
    place = {c: i for i, c in enumerate(categories)}
    # The largest first, so that small ones stay visible.
    ordered = sorted(found, key=lambda o: -o["bbox"][2] * o["bbox"][3])
    # One colour per object, so that neighbours of one class can be distinguished.
    colours = [_bright(colour) for colour in palette(len(ordered))]
    for entry, colour in zip(ordered, colours, strict=True):
        if not rle.is_empty(entry.get("segmentation")):
            _tint(canvas, entry, colour)
    draw = ImageDraw.Draw(canvas)
    line = max(1, round(min(image.size) / 250))
    texts = [_text(entry, names[place[entry["category_id"]]]) for entry in ordered]
    font, texts = prepare_labels(texts, max(10, min(image.size) // 32))
    for entry, colour, text in zip(ordered, colours, texts, strict=True):
        left, top, w, h = entry["bbox"]
        right, bottom = max(left, left + w - 1), max(top, top + h - 1)
        draw.rectangle((left, top, right, bottom), outline=colour, width=line)
        _label(draw, (left, top), text, colour, font, image.size)
    return canvas


def _text(entry: Json, name: str) -> str:
    score = f" {entry['score']:.2f}" if "score" in entry else ""
    return name + score + (" (crowd)" if entry.get("iscrowd") else "")


def _bright(colour: Colour) -> Colour:
    r, g, b = (min(255, 50 + 3 * c // 2) for c in colour)
    return r, g, b


def _tint(canvas: Image.Image, entry: Json, colour: Colour) -> None:
    """Colour the pixels of a mask in place, in strips of its box, to bound the memory of the float copy."""
    mask = rle.draw(entry["segmentation"], (canvas.height, canvas.width))
    box = rle.box_of(mask)
    if box is None:
        return
    left, first, right, last = box
    rows = max(1, STRIP // (right - left))
    for top in range(first, last, rows):
        bottom = min(top + rows, last)
        part = (left, top, right, bottom)
        pixels = np.asarray(canvas.crop(part))
        mixed = (1 - STRENGTH) * pixels + STRENGTH * np.array(colour)
        inside = mask[top:bottom, left:right, None] > 0
        tinted = np.where(inside, mixed.round(), pixels).astype(np.uint8)
        canvas.paste(Image.fromarray(tinted), part)


def _label(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    colour: Colour,
    font: Font,
    size: tuple[int, int],
) -> None:
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    w, h = right - left + 4, bottom - top + 4
    x = min(max(0, at[0]), max(0, size[0] - w))
    y = at[1] - h if at[1] >= h else at[1]
    draw.rectangle((x, y, x + w, y + h), fill=colour)
    light = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 140
    draw.text((x + 2 - left, y + 2 - top), text, fill="black" if light else "white", font=font)


def require_drawable(found: object, size: tuple[int, int]) -> None:
    """Raise `ValueError` unless detections from a file fit an image of that height and width.

    The code that decodes shapes trusts its input, so this check comes before it.
    """
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError("detections must be a list of objects")
    for each in found:
        box = each.get("bbox")
        numbers = box if isinstance(box, list) and len(box) == 4 else [None]
        if not all(isinstance(n, int | float) and abs(n) < MAX_COORDINATE for n in numbers):
            raise ValueError(f"bbox must be four numbers below {MAX_COORDINATE:g}")
        if (problem := rle.shape_problem(each.get("segmentation"), size)) is not None:
            raise ValueError(f"a shape that cannot be drawn: {problem}")
