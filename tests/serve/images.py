"""Image files for tests of the server, and the comparison of JSON results."""

import io

import numpy as np
import pytest
from PIL import Image
from support.weights import pixels

NAME = "picture"  # the key of the file name in a result (kept name)


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def kinds() -> dict[str, bytes]:
    """Image files that are often decoded wrongly."""
    image = Image.fromarray(pixels(91, 60))
    exif = Image.Exif()
    exif[274] = 6
    clear = np.dstack([pixels(37, 53), np.tile(np.arange(37, dtype=np.uint8) * 6, (53, 1))])
    return {
        "odd": file_of(Image.fromarray(pixels(113, 47))),
        "turned": file_of(image, "JPEG", exif=exif, quality=92),
        "grey": file_of(image.convert("L")),
        "clear": file_of(Image.fromarray(clear)),
        "cmyk": file_of(image.convert("CMYK"), "JPEG"),
        "webp": file_of(image, "WEBP"),
    }


def near(one, two) -> bool:
    """Return whether both are equal up to float rounding."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(near(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(near(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, float):
        return one == pytest.approx(two, abs=1e-3)
    return one == two
