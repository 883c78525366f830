"""Inference on a square centre crop of each image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from PIL import Image
from torch import Tensor, nn

from ..data.transforms.images import eval_transform
from .pipeline import Pipeline
from .prediction import Json

MAX_BATCH_PIXELS = 16 * 384**2


@dataclass(frozen=True, kw_only=True)
class SquarePipeline(Pipeline):
    """Pipeline that passes a square centre crop to the model.

    Attributes:
        size: side of the crop.
        crop: the short side is first resized to size / crop.
    """

    interpolation: str = "bicubic"
    size: int = 224
    crop: float = 0.875

    @classmethod
    def from_module(cls, model: nn.Module, config: Mapping[str, Any]) -> Self:
        """Return the pipeline with the size and crop in timm's config."""
        size = config.get("input_size", (3, 224, 224))[-1]
        made = super().from_module(model, config)
        return replace(made, size=size, crop=config.get("crop_pct", 0.875))

    @property
    def batch_size(self) -> int:
        """16, fewer for large images: a header may set the size, which must not require the memory of many images."""
        return min(16, max(1, MAX_BATCH_PIXELS // self.size**2))

    def preprocess(self, image: Image.Image) -> Tensor:
        """Resize the short side and return the centre."""
        return eval_transform(self.size, self.crop, self.interpolation)(image)

    def input_size(self) -> Json:
        """Return size and crop."""
        return {"size": self.size, "crop": self.crop}

    def export_side(self) -> int:
        """Return the size of the crop."""
        return self.size

    def trace_size(self, default: int, maximum: int) -> int:
        """Return the size of the crop."""
        return min(self.size, maximum)

    def seen_pixels(self, width: int, height: int) -> tuple[int, int]:
        """Return the number of pixels of the crop, and of the resized image."""
        side = self.size / self.crop
        return self.size**2, round(width * height * (side / min(width, height)) ** 2)

    def max_seen(self, batch: int, bound: int) -> int:
        """Return the number of pixels of a batch, within the bound; at least one image."""
        return max(self.size**2, min(bound, batch * self.size**2))

    def probe_side(self, default: int) -> int:
        """Return the size of the crop."""
        return self.size
