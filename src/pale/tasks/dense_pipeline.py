"""Inference on whole images with bounded sides; results have the size of the image."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from PIL import Image

from ..data.reading import UnreadableImageError
from ..data.transforms.resizing import fit_size
from ..errors import WeightsError
from .pipeline import Pipeline
from .prediction import Json

MAX_SEEN = 2**24  # maximum number of pixels that a model processes in one piece


class SideBounds(Protocol):
    """Bounds of the sides of an image."""

    @property
    def short(self) -> int | None:
        """Length of the short side after resizing; None: images keep their size."""

    @property
    def long(self) -> int | None:
        """Maximum length of the long side after resizing."""


@dataclass(frozen=True, kw_only=True)
class DensePipeline(Pipeline):
    """Pipeline that passes the whole image to the model; `test.short` and `test.long` bound its sides."""

    options: ClassVar[frozenset[str]] = frozenset({"own_size"})

    @property
    @abstractmethod
    def bounds(self) -> SideBounds:
        """Settings of inference."""

    @property
    def batch_size(self) -> int:
        """Default batch size; small, because results are as large as images."""
        return 4

    @property
    def scale(self) -> float:
        """Largest scale factor of inference at several scales."""
        return 1.0

    @property
    def in_pieces(self) -> bool:
        """Whether the model processes the image in pieces of bounded size."""
        return False

    def resized(self, height: int, width: int, scale: float = 1.0) -> tuple[int, int]:
        """Return height and width of the model input for an image of this size."""
        return fit_size(height, width, self.bounds.short, self.bounds.long, scale)

    def require_size(self, image: Image.Image) -> None:
        """Raise an error if the model input for an image has more than `MAX_SEEN` pixels."""
        if self.in_pieces:
            return
        h, w = self.resized(image.height, image.width, self.scale)
        if h * w > MAX_SEEN:
            windows = ", or use windows (slide)" if "slide" in self.options else ""
            raise UnreadableImageError(
                f"the model would see this image of {image.width}x{image.height} at {w}x{h}, and at most "
                f"{MAX_SEEN:,} pixels go through it in one piece; let it be resized (no own size), shrink it{windows}"
            )

    def input_size(self) -> Json:
        """Return the bounds of the sides."""
        return {"short": self.bounds.short, "long": self.bounds.long}

    def export_side(self) -> int:
        """Return the short side, at most 512."""
        return min(self.bounds.short or 128, 512)

    def trace_size(self, default: int, maximum: int) -> int:
        """Return the short side, at most the default."""
        return min(self.bounds.short or default, default)

    def seen_pixels(self, width: int, height: int) -> tuple[int, int]:
        """Return the number of pixels of the resized image, twice: the model processes all of it at once."""
        h, w = self.resized(height, width)
        return h * w, h * w

    def max_seen(self, batch: int, bound: int) -> int:
        """Return the number of pixels of a batch of images with the largest sides, within the bound."""
        short, long = self.bounds.short, self.bounds.long
        if short is None or long is None or self.in_pieces:
            return bound
        return min(bound, batch * short * long)


def require_classes(classes: tuple[str, ...], source: str) -> tuple[str, ...]:
    """Return the classes; raise an error if there are none."""
    if not classes:
        raise WeightsError(
            f"{source} has no class names, and the data of its recipe is not available; "
            "give weights of a run, or a recipe whose data is available"
        )
    return classes


def is_number_list(values: object, count: int, below: int) -> bool:
    """Return whether a value from a file is a list of `count` integers from 0 to below the bound."""
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(v) is int and 0 <= v < below for v in values)
    )
