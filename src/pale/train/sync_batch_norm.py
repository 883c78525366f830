"""Batch norm over the images of all processes, so that the number of processes does not change a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .distributed import World


def sync_batch_norms(model: nn.Module, world: World) -> nn.Module:
    """Synchronise the batch norms of a model over several processes; parameters stay the same objects."""
    if world.size == 1:
        return model
    if world.device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncBatchNorm2d
    return model


class Sum(torch.autograd.Function):
    """Sum over all processes; the gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sum over the processes."""
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Sum the gradients over the processes."""
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Synchronised batch norm on CPUs; PyTorch's own supports only GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (b, c, h, w)."""
        if not self.training:
            return super().forward(x)
        count = x.new_full((1,), float(x.numel() // x.shape[1]))
        sums = Sum.apply(torch.cat([x.sum((0, 2, 3)), count]))
        n = sums[-1].detach()
        mean = sums[:-1] / n
        centred = x - mean[:, None, None]
        var = Sum.apply(centred.square().sum((0, 2, 3))) / n
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                momentum = self.momentum or 0.1
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(var * n / (n - 1).clamp(min=1), momentum)
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked += 1
        y = centred * (var + self.eps).rsqrt()[:, None, None]
        return y * self.weight[:, None, None] + self.bias[:, None, None]
