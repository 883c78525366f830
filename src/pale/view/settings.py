"""Options of `pale view attention`. This module imports nothing heavy, for a fast `pale --help`."""

from __future__ import annotations

from pathlib import Path

from ..core.options import argument, option, settings_class


@settings_class
class AttentionSettings:
    """A photo, a point in it, and which part of a model to draw; numbers count from 1."""

    photo: Path = argument("image", metavar="PHOTO")
    output: Path = option("file to write: out.png, or out.html for a page", "-o", metavar="FILE")
    point: tuple[float, float] | None = option(
        "position in pixels of the photo (default: the centre)", default=None, metavar=("X", "Y")
    )
    weights: str | None = option(
        "run folder, .safetensors file, or model name (default: the included classifier)",
        default=None,
        metavar="MODEL",
    )
    recipe: str | None = option(
        "recipe of the model, for weights that were not trained with pale", default=None
    )
    stage: int | None = option(
        "stage whose blocks are shown, 1 to 4 (default: all stages)", default=None
    )
    block: int | None = option("block, from 1 (default: the last of each stage)", default=None)
    head: str = option("head: mean, rows, columns, or a number from 1", default="mean")
    class_name: str | None = option(
        "class of Grad-CAM, name or number (default: the predicted class)",
        "--class",
        default=None,
        metavar="NAME",
    )
    size: int | None = option(
        "short side of the resized photo (default: the training size, or 224)", default=None
    )
