"""Cross-entropy of pixels by Triton kernels, without storing logits at the size of the masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...data.sources.class_list import IGNORED
from ...ops.launching import AVAILABLE, DTYPES, INTERPRETED, launch

MODULE = "pale.tasks.segmentation.loss_kernels"
MAX_CLASSES = 512  # a program holds the logits of all classes
BLOCK = 1024  # elements per program of the reduction


def can_fuse(logits: Tensor) -> bool:
    """Return whether the kernels can run."""
    here = AVAILABLE and (logits.is_cuda or INTERPRETED)
    return here and logits.dtype in DTYPES and logits.shape[1] <= MAX_CLASSES


def pixel_losses(logits: Tensor, masks: Tensor, weights: Tensor | None) -> Tensor:
    """Return the cross-entropy of each pixel, 0 where ignored; logits (b, n, h', w') are resized to masks (b, h, w)."""
    return _PixelLosses.apply(logits, masks, weights)


class _PixelLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, masks: Tensor, weights: Tensor | None) -> Tensor:
        maps = logits.movedim(1, -1).contiguous()
        masks = masks.contiguous()
        weights = None if weights is None else weights.float().contiguous()
        loss = torch.empty(masks.shape, device=masks.device)
        total = torch.empty_like(loss)
        given = maps, masks, maps if weights is None else weights, loss, total
        _launch("loss_forward", given, maps, masks, weights)
        ctx.save_for_backward(maps, masks, weights, total)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        maps, masks, weights, total = ctx.saved_tensors
        b, h, w, n = maps.shape
        parts = torch.empty(b, h, w, 4, n, device=maps.device)
        given = maps, masks, maps if weights is None else weights, total, gradient.contiguous()
        _launch("loss_backward", (*given, parts), maps, masks, weights)
        result = torch.empty_like(maps)
        grid = (b * h, -(-w * n // BLOCK))
        options = {"num_warps": 4}
        launch(MODULE, "loss_gather", grid, parts, result, h, w, options=options, N=n, BLOCK=BLOCK)
        return result.movedim(-1, 1), None, None


def _launch(
    name: str, given: tuple[Tensor, ...], maps: Tensor, masks: Tensor, weights: Tensor | None
) -> None:
    """Launch a kernel with one program per cell, or per group of neighbouring cells."""
    b, h, w, n = maps.shape
    block = max(16, 1 << (n - 1).bit_length())
    cells = max(1, 256 // block)  # as many as fit in the registers of one warp
    launch(
        MODULE,
        name,
        (b * h, -(-w // cells)),
        *given,
        *(h, w, *masks.shape[1:]),
        options={"num_warps": 1},
        N=n,
        BLOCK_N=block,
        BLOCK_J=cells,
        IGNORED=IGNORED,
        WEIGHTED=weights is not None,
    )
