"""Result of inference for one image, for all tasks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..core.plain_json import Json as Json
from ..data import rle
from ..data.rle import Shape

MAX_DRAWN = 2**25  # maximum pixels of a drawn image; larger images are shrunk
MAX_DRAWN_SIDE = 16_384  # the maximum of JPEG files is 65,500


def drawable(image: Image.Image) -> Image.Image:
    """Return the image, shrunk if a drawing of it would be too large for memory or for a JPEG file."""
    w, h = image.size
    ratio = min(1.0, MAX_DRAWN_SIDE / max(w, h), (MAX_DRAWN / (w * h)) ** 0.5)
    if ratio == 1.0:
        return image
    return image.resize((max(1, int(w * ratio)), max(1, int(h * ratio))))


@dataclass(frozen=True)
class Region:
    """A part of an image and its class; the whole image if there is neither box nor shape.

    Attributes:
        label: name of the class.
        score: probability; None if the task has none.
        box: left, top, width, height in pixels.
        shape: run-length code of COCO.
    """

    label: str
    score: float | None
    box: tuple[float, float, float, float] | None = None
    shape: Shape = None

    def bounds(self, size: tuple[int, int]) -> list[float]:
        """Return the box, or that of the shape in an image of this height and width."""
        if self.box is not None:
            return list(self.box)
        left, top, right, bottom = rle.box_of(rle.draw(self.shape, size)) or (0, 0, 0, 0)
        return [left, top, right - left, bottom - top]


@dataclass(frozen=True)
class ArraySpec:
    """Type and shape of an array of a result.

    Attributes:
        dtype: NumPy dtype; object for bytes.
        dims: sizes; "count" is the number of objects, "height" and "width" are those of the image.
    """

    dtype: type[np.generic] | type[object]
    dims: tuple[int | str, ...]


class Collector(Protocol):
    """Collects all predictions of a folder for one file that is written at the end."""

    def add(self, prediction: Any) -> None:
        """Add one prediction."""

    def write(self, folder: Path) -> None:
        """Write the file."""


@dataclass(frozen=True)
class Prediction(ABC):
    """The result for one image.

    Attributes:
        name: name of the image.
        image: decoded RGB image.
        collector: class that writes all predictions of a folder into one file, if the task has such a file.
    """

    collector: ClassVar[type[Collector] | None] = None

    name: str
    image: Image.Image

    @abstractmethod
    def plain(self) -> Json:
        """Return the result as a JSON object."""

    def regions(self) -> list[Region]:
        """Return the result as parts of the image with a class each, for annotation tools; none by default."""
        return []

    @abstractmethod
    def words(self) -> str:
        """Return the result as one line of text."""

    @abstractmethod
    def draw(self) -> Image.Image:
        """Return the image with the result drawn on it."""

    def rows(self) -> list[Json]:
        """Return the result as rows of a table."""
        return [self.plain()]

    def arrays(self, classes: Sequence[str]) -> dict[str, NDArray[np.generic]]:
        """Return the result as arrays, as `Pipeline.array_specs` describes them; by default its JSON as bytes.

        Args:
            classes: names of all classes.
        """
        return {"result": np.array(json.dumps(self.plain()).encode(), object)}

    def mask(self) -> Image.Image | None:
        """Return the result as an image of class numbers, or None if the task has none."""
        return None

    def extra_images(self) -> Mapping[str, Image.Image]:
        """Return further images to be written, by the suffix of their file names."""
        mask = self.mask()
        return {} if mask is None else {"_mask.png": mask}

    def header(self) -> Json:
        """Return the fields of every result: name and size of the image."""
        size = {"width": self.image.width, "height": self.image.height}
        return {"picture": self.name} | size  # kept name
