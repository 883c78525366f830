"""Peak memory in bytes per pixel of an image, measured for each format, mode and output.

`tests/serve/test_memory.py` compares their sum with the memory of a real server.
"""

from __future__ import annotations

from math import sqrt

RGB = 4  # a decoded image; Pillow pads RGB to four bytes per pixel
TWICE = 2 * RGB  # rotated, or converted to RGB: the image before and after
ARRAY = 6  # pixels as an array, and the bytes from which it is made
LABELS = 1
PASTED = 7  # a detector's mask at the size of the image: as floats, compared, and in COCO's order
OUTLINE = 2  # a shape's pixels, twice
JPEG_OUT = 3  # the encoded result in a growing buffer
PNG_OUT = 4  # likewise; of a mask also in base64 and in JSON


def resizing(size: tuple[int, int], scaled: int) -> int:
    """Return the bytes that resizing an image takes.

    Args:
        size: width and height of the image.
        scaled: pixels after it.
    """
    return round(TWICE * scaled + RGB * sqrt(size[0] * size[1] * scaled))
