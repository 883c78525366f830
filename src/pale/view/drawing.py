"""Text, dots and file suffixes of drawn figures."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw

from ..core.fonts import prepare_labels
from ..errors import SettingsError

DOT, INK, FAINT = "#d7191c", "#1d2530", "#56606d"
SUPERSAMPLING = 8


def draw_dot(image: Image.Image, centre: tuple[float, float], radius: float) -> None:
    """Draw the red dot of the paper, in a white ring that separates it from every tint."""
    left, top = (int(c - radius) - 4 for c in centre)
    x, y = SUPERSAMPLING * (centre[0] - left), SUPERSAMPLING * (centre[1] - top)
    side = SUPERSAMPLING * (2 * int(radius) + 10)
    for r, colour in ((SUPERSAMPLING * (radius + 2), "white"), (SUPERSAMPLING * radius, DOT)):
        mask = Image.new("L", (side, side))
        ImageDraw.Draw(mask).ellipse((x - r, y - r, x + r, y + r), 255)
        image.paste(colour, (left, top), mask.reduce(SUPERSAMPLING))


def draw_text(
    image: Image.Image, x: int, y: int, size: int, ink: str, *line: tuple[str, str]
) -> None:
    """Draw a line of (tint, text) pairs, each text after a swatch of its tint if it has one.

    Args:
        image: image to draw on.
        x: left end of the line.
        y: top of the capital letters.
        size: font size in pixels.
        ink: colour of the text.
        line: pairs of tint ("" for none) and text.
    """
    # Supersampled, since the hinting of small letters spaces them unevenly.
    font, texts = prepare_labels([text for _, text in line], SUPERSAMPLING * size)
    side = -round(font.getbbox("H", anchor="ls")[1] / SUPERSAMPLING)
    for (tint, _), text in zip(line, texts, strict=True):
        if tint:
            image.paste(tint, (x, y, x + side, y + side))
            x += round(1.4 * side)
        width = int(font.getlength(text)) // SUPERSAMPLING + 1
        mask = Image.new("L", (SUPERSAMPLING * width, SUPERSAMPLING * 2 * size))
        ImageDraw.Draw(mask).text((0, SUPERSAMPLING * size), text, 255, font, anchor="ls")
        image.paste(ink, (x, y + side - size), mask.reduce(SUPERSAMPLING))
        x += width + round(0.9 * size)


def check_image_suffix(path: str | Path, also: str = "") -> None:
    """Raise SettingsError unless Pillow can write a file with this suffix.

    Args:
        path: the file.
        also: text for the message about another suffix that the caller accepts.
    """
    path = Path(path)
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise SettingsError(
            f"the suffix must {also}name an image format that Pillow writes, got {path.name!r}; use .png"
        )
