"""Models as a file holds them: a tensor of images in, named tensors out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from ..tasks.detection.fixed import NAMES, FixedMaskRCNN

if TYPE_CHECKING:
    from ..loading import Loaded


class Whole(nn.Module):
    """A model whose logits have the size of the image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(b, 3, h, w) -> (b, classes, h, w)."""
        return F.interpolate(
            self.model(images), images.shape[-2:], mode="bilinear", align_corners=False
        )


class Plain(nn.Module):
    """A model whose argument goes by the name that the files give it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(b, 3, h, w) -> (b, classes)."""
        return self.model(images)


def graph_of(loaded: Loaded) -> tuple[nn.Module, tuple[str, ...]]:
    """What is exported of a model, and the names of its outputs."""
    if loaded.kind == "detection":
        model = loaded.model
        test = loaded.test
        model.limits(test.score, test.nms, test.most)  # type: ignore[operator,union-attr]
        return FixedMaskRCNN(model), NAMES if model.with_masks else NAMES[:3]  # type: ignore[arg-type]
    return (Whole if loaded.kind == "segmentation" else Plain)(loaded.model), ("logits",)
