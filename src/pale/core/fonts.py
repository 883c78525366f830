"""Fonts for text in images: Pillow's own font, which has ASCII only, or a font of the system for other text."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

# File names that Pillow looks up in the font folders of the system; the one with most of the characters is used.
SYSTEM_FONTS = (
    "DejaVuSans.ttf",
    "NotoSans-Regular.ttf",
    "LiberationSans-Regular.ttf",
    "arial.ttf",  # Windows
    "Arial Unicode.ttf",  # macOS
    "NotoSansCJK-Regular.ttc",
    "msyh.ttc",  # Windows, Chinese
    "PingFang.ttc",  # macOS, Chinese
)
# Letters that Unicode does not decompose.
LETTERS = str.maketrans(
    {"ß": "ss", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L"}
)
UNASSIGNED = "\uffff"  # drawn as the box for missing characters


def prepare_labels(texts: Sequence[str], size: float) -> tuple[Font, list[str]]:
    """Return a font and the texts to draw with it.

    ASCII is drawn in Pillow's own font. Characters that no font here has lose their accents, or become "?".
    """
    wanted = {c for text in texts for c in text if not c.isascii()}
    if not wanted:
        return ImageFont.load_default(size), list(texts)
    best, missing = "", wanted
    for name in SYSTEM_FONTS:
        if path := _find(name):
            rest = {c for c in wanted if not _has(path, c)}
            if len(rest) < len(missing):
                best, missing = path, rest
        if not missing:
            break
    font = (
        ImageFont.truetype(best, size, layout_engine=ImageFont.Layout.BASIC)
        if best
        else ImageFont.load_default(size)
    )
    return font, ["".join(to_ascii(c) if c in missing else c for c in text) for text in texts]


def to_ascii(text: str) -> str:
    """Return a text with accents removed and other characters replaced by "?"."""
    plain = unicodedata.normalize("NFKD", text.translate(LETTERS))
    letters = (c for c in plain if not unicodedata.combining(c))
    return "".join(c if c.isascii() else "?" for c in letters)


@cache
def _find(name: str) -> str:
    """Return the path of a font of the system, or "" if it is not installed."""
    try:
        # Given a bare name, Pillow first opens a file of that name in the working folder, which may be anyone's data.
        # This path does not exist, so only the font folders are searched.
        return str(ImageFont.truetype(Path(__file__).with_name(name), 16).path)
    except OSError:
        return ""


@lru_cache(maxsize=4096)
def _has(path: str, character: str) -> bool:
    font = ImageFont.truetype(path, 16, layout_engine=ImageFont.Layout.BASIC)
    drawn, box = font.getmask(character), font.getmask(UNASSIGNED)
    return (drawn.size, bytes(drawn)) != (box.size, bytes(box))
