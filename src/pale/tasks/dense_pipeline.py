"""Inference on whole images, whose sides are bounded; for results at the size of the image."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from PIL import Image

from ..data.reading import UnreadableImageError
from ..data.transforms.resizing import fit_size
from ..errors import WeightsError
from .pipeline import Pipeline
from .prediction import Json

MAX_SEEN = 2**24  # pixels that go through a model in one piece


class SideBounds(Protocol):
    """How the sides of an image are bounded."""

    @property
    def short(self) -> int | None:
        """The short side is brought to this; None: images keep their size."""

    @property
    def long(self) -> int | None:
        """Unless the long side would exceed this."""


@dataclass(frozen=True, kw_only=True)
class DensePipeline(Pipeline):
    """The model is given the whole image; `test.short` and `test.long` bound its sides."""

    options: ClassVar[frozenset[str]] = frozenset({"own_size"})

    @property
    @abstractmethod
    def bounds(self) -> SideBounds:
        """Settings of inference."""

    @property
    def batch_size(self) -> int:
        """Few, as results are as large as images."""
        return 4

    @property
    def scale(self) -> float:
        """The largest factor by which images are resized after that."""
        return 1.0

    @property
    def in_pieces(self) -> bool:
        """Whether the image goes through the model in pieces of bounded size."""
        return False

    def resized(self, height: int, width: int, scale: float = 1.0) -> tuple[int, int]:
        """Return height and width that the model sees of an image of this size."""
        return fit_size(height, width, self.bounds.short, self.bounds.long, scale)

    def require_size(self, image: Image.Image) -> None:
        """Raise an error for an image that the model would see with more than `MAX_SEEN` pixels."""
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
        """Return the pixels of the resized image, twice: all of it is seen at once."""
        h, w = self.resized(height, width)
        return h * w, h * w

    def max_seen(self, batch: int, bound: int) -> int:
        """Return the pixels of a batch of images with the largest sides, within the bound."""
        short, long = self.bounds.short, self.bounds.long
        if short is None or long is None or self.in_pieces:
            return bound
        return min(bound, batch * short * long)


def require_classes(classes: tuple[str, ...], source: str) -> tuple[str, ...]:
    """Return the classes; raise an error where there are none."""
    if not classes:
        raise WeightsError(
            f"{source} does not name its classes, and the data of its recipe is not here to name them; "
            "give weights of a run, or a recipe whose data is available"
        )
    return classes


def is_number_list(values: Any, count: int, below: int) -> bool:
    """Return whether values out of a file are a list of so many integers from 0 to below the bound."""
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(v) is int and 0 <= v < below for v in values)
    )
