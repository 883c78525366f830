"""Images of a report: the best and the worst ones of an evaluation, and several next to each other."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from .prediction import Json

SHOWN = 6  # number of best images, and of worst images
GAP = 4  # pixels


def best_and_worst(entries: Sequence[Json], score: str) -> list[Json]:
    """Return the entries with the highest and the lowest values of `score`, the best first."""
    ordered = sorted(entries, key=lambda entry: (-entry[score], entry["index"]))
    return ordered if len(ordered) <= 2 * SHOWN else ordered[:SHOWN] + ordered[-SHOWN:]


def side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """Return images of one size next to each other."""
    w, h = images[0].size
    canvas = Image.new("RGB", (len(images) * (w + GAP) - GAP, h), "white")
    for place, image in enumerate(images):
        canvas.paste(image, (place * (w + GAP), 0))
    return canvas
