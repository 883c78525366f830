"""Drop path with masks that depend on (seed, step) and a sample's position in the global batch, not on the process."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from timm.layers import DropPath
from torch import Tensor, nn

from ..data.seeding import derive_seed
from ..ops.shortcuts import plain_kind


@plain_kind
class SampledDropPath(nn.Module):
    """DropPath (timm) with a mask that `DropPaths` sets."""

    # It only scales images, so that a fused block can use the mask directly.
    scales_images = True

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask  # (b,): 0, or 1 / keep probability

    def forward(self, x: Tensor) -> Tensor:
        """Scale each sample by its mask during training."""
        if not self.training:
            return x
        return x * self.mask.view(-1, *[1] * (x.ndim - 1)).to(x.dtype)


class DropPaths:
    """All drop paths of a model; its DropPath modules are replaced.

    Args:
        model: on its device.
        batch: size of the global batch.
        part: number of samples in one forward pass.
        seed: seed of all masks.
    """

    def __init__(self, model: nn.Module, batch: int, part: int, seed: int) -> None:
        self.batch, self.seed = batch, seed
        found = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, DropPath)
        ]
        self.keep = torch.tensor([1 - child.drop_prob for _, _, child in found]).view(-1, 1)
        device = next(model.parameters()).device
        # One tensor for all modules, so that a step needs one copy.
        self.masks = torch.ones(len(found), part, device=device)
        for mask, (parent, name, _) in zip(self.masks, found, strict=True):
            setattr(parent, name, SampledDropPath(mask))

    def draw(self, step: int, positions: NDArray[np.int64]) -> None:
        """Set the masks for the samples at `positions` of a step's batch."""
        if not len(self.masks):
            return
        generator = torch.Generator().manual_seed(derive_seed(self.seed, step))
        chance = torch.rand(len(self.masks), self.batch, generator=generator)
        chance = chance[:, torch.from_numpy(positions)]
        masks = (chance < self.keep) / self.keep
        if self.masks.is_cuda:  # pinned, so that the CPU does not wait for the GPU
            masks = masks.pin_memory()
        self.masks.copy_(masks, non_blocking=True)
