"""Images inside of pages."""

from __future__ import annotations

import base64
import io

from PIL import Image


def jpeg_data_url(image: Image.Image, max_size: tuple[int, int], quality: int) -> str:
    """Return an image as a data URL, shrunk to at most this width and height."""
    image = image.convert("RGB")
    image.thumbnail(max_size)
    content = io.BytesIO()
    image.save(content, "JPEG", quality=quality)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
