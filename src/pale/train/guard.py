"""Detection of NaN and Inf without synchronisation.

The device itself skips a step whose loss or gradient is NaN or Inf (`found_inf` of PyTorch's fused AdamW). After too
many of them in a row it skips every later step too. The values are copied to the host asynchronously and read there
one step later; until then the weights are still those before the bad step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from ..compat import foreach_add_, foreach_mul_, foreach_sub
from .distributed import World

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LAG = 1  # steps that may still run on the device when a step is checked


@dataclass(frozen=True)
class StepRecord:
    """Result of a step.

    Attributes:
        step: its number.
        lr: its learning rate.
        keys: samples of this process, (b, 2).
        loss: on this process.
        norm: gradient norm.
        bad: whether loss or norm is NaN or Inf on any process.
        bad_here: whether it is on this process.
    """

    step: int
    lr: float
    keys: Tensor
    loss: float
    norm: float
    bad: bool
    bad_here: bool


class Guard:
    """Check every step on the device and report it one step later.

    Args:
        world: the processes.
        limit: number of bad steps in a row after which no step changes the weights any more.
    """

    def __init__(self, world: World, limit: int) -> None:
        self.world, self.limit = world, limit
        self.bad_in_a_row = torch.zeros((), device=world.device)
        self.halted = torch.zeros((), device=world.device)
        self.pending: deque[tuple[int, float, Tensor, Tensor, torch.cuda.Event | None]] = deque()

    @torch.no_grad()
    def check(self, step: int, lr: float, keys: Tensor, loss: Tensor, norm: Tensor) -> Tensor:
        """Return a tensor on the device: 1 if the step must be skipped, else 0."""
        bad = (~(loss.isfinite() & norm.isfinite())).float()
        self.world.max_(bad)
        self.bad_in_a_row.add_(1).mul_(bad)
        torch.maximum(self.halted, (self.bad_in_a_row >= self.limit).float(), out=self.halted)
        # float64 represents every float32 exactly.
        figures = torch.stack([loss.double(), norm.double(), bad.double()])
        event = None
        if figures.is_cuda:
            host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            figures = host.copy_(figures, non_blocking=True)
            event = torch.cuda.current_stream(loss.device).record_event()
        self.pending.append((step, lr, keys, figures, event))
        return torch.maximum(bad, self.halted)

    def completed(self, lag: int) -> Iterator[StepRecord]:
        """Yield the records of steps not yet yielded, except the last `lag`."""
        while len(self.pending) > lag:
            step, lr, keys, figures, event = self.pending.popleft()
            if event is not None:
                event.synchronize()
            loss, norm, bad = figures.tolist()
            bad_here = not (math.isfinite(loss) and math.isfinite(norm))
            yield StepRecord(step, lr, keys, loss, norm, bool(bad), bad_here)


class BatchNormBackup:
    """Copy of the batch norm statistics, which a forward pass changes even if its step is skipped."""

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
        self.buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self.copies = [buffer.clone() for buffer in self.buffers]

    @torch.no_grad()
    def save(self) -> None:
        """Copy the current statistics."""
        for copy, buffer in zip(self.copies, self.buffers, strict=True):
            copy.copy_(buffer)

    @torch.no_grad()
    def restore_if(self, skip: Tensor) -> None:
        """Restore the copy if `skip` is 1."""
        for copy, buffer in zip(self.copies, self.buffers, strict=True):
            buffer.copy_(torch.where(skip > 0, copy, buffer))


class MovingAverage(ModelEmaV3):  # type: ignore[misc]
    """Moving average of a model (timm), with an update that the device can skip."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, decay=decay)
        # Tensors of average and model; they stay the same until the end.
        self.floats: tuple[list[Tensor], list[Tensor]] | None = None
        self.others: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def update_unless(self, skip: Tensor, model: nn.Module) -> None:
        """Run `update(model)` if `skip` is 0; change nothing if it is 1."""
        if self.floats is None:
            own, states = self.module.state_dict(), model.state_dict()
            pairs = list(zip(own.values(), states.values(), strict=True))
            floats = [pair for pair in pairs if pair[0].is_floating_point()]
            self.floats = [average for average, _ in floats], [value for _, value in floats]
            self.others = [pair for pair in pairs if not pair[0].is_floating_point()]
        averages, values = self.floats
        moves = foreach_sub(values, averages)
        foreach_mul_(moves, (1 - self.decay) * (1 - skip))
        foreach_add_(averages, moves)
        for average, value in self.others:
            average.copy_(value)
