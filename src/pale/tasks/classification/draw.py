"""Draw the classes of an image as bars below it."""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image, ImageDraw

from ...core.fonts import prepare_labels
from ..prediction import MAX_DRAWN_SIDE, drawable

INK, PAPER, BAR = (38, 42, 51), (250, 250, 247), (60, 118, 160)
MAX_BARS = 20  # classes that are drawn
MIN_WIDTH = 240
LINES_IN_WIDTH = 22
MIN_LINE = 16  # pixels


def draw_bars(image: Image.Image, scores: Mapping[str, float]) -> Image.Image:
    """Return the image with a bar for each class below.

    Args:
        image: RGB.
        scores: probability by class name, the best first.
    """
    image, shown = drawable(image), list(scores.items())[:MAX_BARS]
    width = max(image.width, MIN_WIDTH)
    line = max(MIN_LINE, min(width, 4 * MAX_DRAWN_SIDE // MAX_BARS) // LINES_IN_WIDTH)
    texts = [f"{100 * p:.1f} %  {name}" for name, p in shown]
    font, texts = prepare_labels(texts, round(0.7 * line))
    height = round(line * (len(shown) + 0.6))
    canvas = Image.new("RGB", (width, image.height + height), PAPER)
    canvas.paste(image, ((width - image.width) // 2, 0))
    pen = ImageDraw.Draw(canvas)
    for i, ((_, p), text) in enumerate(zip(shown, texts, strict=True)):
        top = image.height + round(line * (i + 0.3))
        end = 0.03 * width + 0.4 * width * p
        pen.rectangle((0.03 * width, top + 0.15 * line, end, top + 0.85 * line), fill=BAR)
        pen.text((0.46 * width, top + 0.05 * line), text, INK, font)
    return canvas


def size_with_bars(size: tuple[int, int], bars: int) -> tuple[int, int]:
    """Return the maximum width and height of the drawing for an image of this width and height."""
    w, h = size
    w = max(w, MIN_WIDTH)
    return w, h + round(max(MIN_LINE, w // LINES_IN_WIDTH) * (bars + 0.6))
