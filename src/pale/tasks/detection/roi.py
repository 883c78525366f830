"""RoIAlign with a bit-equal gradient in every run if deterministic algorithms are enabled.

The gradient of torchvision on a GPU uses atomic additions, whose order differs from run to run. Its own deterministic
version allocates a table of all regions, channels, cells and pixels, which is too large for real images. But RoIAlign
is separable: the cells are Y x X^T of the map x, where Y (cells, h) and X (cells, w) hold the weights of rows and
columns. So the gradient is the products Y^T g X, summed over the regions of an image.
"""

from __future__ import annotations

from typing import Any

import torch
import torchvision  # noqa: F401  registers torch.ops.torchvision
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchvision.ops import roi_align as plain

MAX_NUMBERS = 2**27  # elements of the products of one chunk of regions


def roi_align(x: Tensor, regions: Tensor, side: int, scale: float) -> Tensor:
    """Return the features of regions, (n, c, side, side), with aligned corners and adaptive sampling.

    Args:
        x: the maps, (b, c, h, w).
        regions: image and box, (n, 5), in pixels of the image.
        side: cells of a region along each axis.
        scale: size of the map relative to the image.
    """
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return plain(x, regions, side, scale, 0, aligned=True)
    if not x.requires_grad:
        return _forward(x, regions, side, scale)
    return _RoIAlign.apply(x, regions, side, scale)


def _forward(x: Tensor, regions: Tensor, side: int, scale: float) -> Tensor:
    # The operator itself: torchvision's function allocates the large table in deterministic mode.
    out: Tensor = torch.ops.torchvision.roi_align(
        x, regions.to(x.dtype), scale, side, side, 0, True
    )
    return out


class _RoIAlign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, regions: Tensor, side: int, scale: float) -> Tensor:
        ctx.save_for_backward(regions)
        ctx.shape, ctx.dtype, ctx.scale = x.shape, x.dtype, scale
        with torch.autocast(x.device.type, enabled=False):
            return _forward(x.float(), regions.float(), side, scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (regions,) = ctx.saved_tensors
        return map_gradient(gradient, regions, ctx.shape, ctx.scale).to(ctx.dtype), None, None, None


def map_gradient(gradient: Tensor, regions: Tensor, shape: tuple[int, ...], scale: float) -> Tensor:
    """Return the gradient of the maps, (b, c, h, w), float32, from that of the cells, (n, c, side, side)."""
    (b, c, h, w), side = shape, gradient.shape[-1]
    out = gradient.new_zeros(b, c, h, w, dtype=torch.float32)
    regions = regions.float()
    image = regions[:, 0].long()
    piece = max(1, MAX_NUMBERS // max(1, c * side * w))
    for i in range(b):
        mine = (image == i).nonzero()[:, 0]
        for some in mine.split(piece):
            y = axis_weights(regions[some, 2], regions[some, 4], scale, side, h)  # (k, side, h)
            x = axis_weights(regions[some, 1], regions[some, 3], scale, side, w)  # (k, side, w)
            rows = gradient[some].float().movedim(1, 2) @ x[:, None]  # (k, side, c, w)
            out[i] += (
                (y.flatten(0, 1).mT @ rows.flatten(0, 1).flatten(1)).view(h, c, w).movedim(1, 0)
            )
    return out


def axis_weights(low: Tensor, high: Tensor, scale: float, cells: int, length: int) -> Tensor:
    """Return the weights of the pixels of an axis in the cells of boxes from `low` to `high`: (n, cells, length).

    As in torchvision's kernel, a cell has ceil(extent / cells) sampling points, each interpolated between two pixels.
    Points more than one pixel outside count as 0, nearer ones take the pixel at the edge.
    """
    start = low * scale - 0.5
    size = (high * scale - 0.5 - start) / cells
    points = size.ceil().clamp(min=0)
    count = points.clamp(min=1)
    out = start.new_zeros(len(start), cells, length)
    places = torch.arange(length, device=start.device, dtype=start.dtype)
    cell = torch.arange(cells, device=start.device, dtype=start.dtype)
    for i in range(int(points.max()) if len(points) else 0):
        point = start[:, None] + (cell + (i + 0.5) / count[:, None]) * size[:, None]  # (n, cells)
        counts = (i < points)[:, None] & (point >= -1) & (point <= length)
        point = point.clamp(0, length - 1)
        share = (1 - (point[..., None] - places).abs()).clamp(min=0)
        out += torch.where(counts[..., None], share, 0.0)
    return out / count[:, None, None]
