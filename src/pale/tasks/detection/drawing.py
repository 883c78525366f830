"""Objects on a picture: shapes, boxes, names and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ...data import rle
from ...data.masks import Colour, palette

STRENGTH = 0.45  # of the colour over the picture


def overlay(
    picture: Image.Image,
    found: Sequence[dict[str, Any]],
    names: Sequence[str],
    categories: Sequence[int],
) -> Image.Image:
    """The picture under shapes and boxes, with names and, where there are any, scores.

    Args:
        picture: of the size that the objects refer to.
        found: COCO's annotations or results.
        names: of the classes.
        categories: their ids.
    """
    pixels = np.array(picture.convert("RGB"))
    place = {c: i for i, c in enumerate(categories)}
    # The greatest first, so that small ones stay visible.
    ordered = sorted(found, key=lambda o: -o["bbox"][2] * o["bbox"][3])
    # A colour for each object, so that neighbours of one class stay apart.
    colours = [_bright(colour) for colour in palette(len(ordered))]
    for entry, colour in zip(ordered, colours, strict=True):
        if not rle.is_empty(entry.get("segmentation")):
            _tint(pixels, entry, colour)
    canvas = Image.fromarray(pixels)
    draw = ImageDraw.Draw(canvas)
    line = max(1, round(min(picture.size) / 250))
    font = ImageFont.load_default(max(10, min(picture.size) // 32))
    for entry, colour in zip(ordered, colours, strict=True):
        left, top, w, h = entry["bbox"]
        right, bottom = max(left, left + w - 1), max(top, top + h - 1)
        draw.rectangle((left, top, right, bottom), outline=colour, width=line)
        text = names[place[entry["category_id"]]]
        if "score" in entry:
            text += f" {entry['score']:.2f}"
        if entry.get("iscrowd"):
            text += " (crowd)"
        _label(draw, (left, top), text, colour, font, picture.size)
    return canvas


def _bright(colour: Colour) -> Colour:
    r, g, b = (min(255, 50 + 3 * c // 2) for c in colour)
    return r, g, b


def _tint(pixels: Any, entry: dict[str, Any], colour: Colour) -> None:
    """Colour the shape's pixels, in place; only its box is touched."""
    mask = rle.draw(entry["segmentation"], (pixels.shape[0], pixels.shape[1]))
    box = rle.box_of(mask)
    if box is None:
        return
    part = (slice(box[1], box[3]), slice(box[0], box[2]))
    mixed = (1 - STRENGTH) * pixels[part] + STRENGTH * np.array(colour)
    pixels[part] = np.where(mask[part][..., None] > 0, mixed.round(), pixels[part])


def _label(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    colour: Colour,
    font: Any,
    size: tuple[int, int],
) -> None:
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    w, h = right - left + 4, bottom - top + 4
    x = min(max(0, at[0]), max(0, size[0] - w))
    y = at[1] - h if at[1] >= h else at[1]
    draw.rectangle((x, y, x + w, y + h), fill=colour)
    light = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 140
    draw.text((x + 2 - left, y + 2 - top), text, fill="black" if light else "white", font=font)


def side_by_side(
    picture: Image.Image,
    own: Sequence[dict[str, Any]],
    found: Sequence[dict[str, Any]],
    names: Sequence[str],
    categories: Sequence[int],
) -> Image.Image:
    """Picture, labels over it, detections over it."""
    w, h = picture.size
    canvas = Image.new("RGB", (3 * w + 8, h), "white")
    canvas.paste(picture, (0, 0))
    canvas.paste(overlay(picture, own, names, categories), (w + 4, 0))
    canvas.paste(overlay(picture, found, names, categories), (2 * w + 8, 0))
    return canvas
