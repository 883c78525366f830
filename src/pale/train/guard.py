"""Steps whose loss or gradient is no number, found on the device, so that no step waits for the one before.

The device itself leaves such a step out (`found_inf` of PyTorch's fused AdamW), and once there were too many in a
row every later one too. What happened is copied to the host behind the computation and read there a step later; by
then the weights are still those from before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from .distributed import World

LAG = 1  # steps that may be under way when one is looked at


@dataclass(frozen=True)
class Seen:
    """A step and what became of it.

    Attributes:
        step: its number.
        lr: its learning rate.
        keys: samples of this process, (b, 2).
        loss: on this process.
        norm: of the gradient.
        bad: whether on any process one of them is no number.
    """

    step: int
    lr: float
    keys: Tensor
    loss: float
    norm: float
    bad: bool

    @property
    def own(self) -> bool:
        """Whether it is bad on this process."""
        return not (math.isfinite(self.loss) and math.isfinite(self.norm))


class Guard:
    """Looks at every step, and tells of it a step later.

    Args:
        world: the processes.
        limit: bad steps in a row after which nothing changes any more.
    """

    def __init__(self, world: World, limit: int) -> None:
        self.world, self.limit = world, limit
        self.row = torch.zeros((), device=world.device)
        self.halted = torch.zeros((), device=world.device)
        self.pending: deque[tuple[int, float, Tensor, Tensor, torch.cuda.Event | None]] = deque()

    @torch.no_grad()
    def look(self, step: int, lr: float, keys: Tensor, loss: Tensor, norm: Tensor) -> Tensor:
        """1 on the device where the step must be left out, else 0."""
        bad = (~(loss.isfinite() & norm.isfinite())).float()
        self.world.max_(bad)
        self.row.add_(1).mul_(bad)
        torch.maximum(self.halted, (self.row >= self.limit).float(), out=self.halted)
        # In float64 a float32 keeps its value.
        figures = torch.stack([loss.double(), norm.double(), bad.double()])
        event = None
        if figures.is_cuda:
            host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            figures = host.copy_(figures, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.pending.append((step, lr, keys, figures, event))
        return torch.maximum(bad, self.halted)

    def seen(self, lag: int) -> Iterator[Seen]:
        """The steps not yet told of, but for the last `lag`."""
        while len(self.pending) > lag:
            step, lr, keys, figures, event = self.pending.popleft()
            if event is not None:
                event.synchronize()
            loss, norm, bad = figures.tolist()
            yield Seen(step, lr, keys, loss, norm, bool(bad))


class Statistics:
    """Those of a model's batch norms, which a forward pass changes: put back where its step is left out."""

    def __init__(self, model: nn.Module) -> None:
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self.kept = [buffer.clone() for buffer in self.buffers]

    @torch.no_grad()
    def keep(self) -> None:
        """Remember them as they are."""
        for kept, buffer in zip(self.kept, self.buffers, strict=True):
            kept.copy_(buffer)

    @torch.no_grad()
    def put_back(self, skip: Tensor) -> None:
        """As they were, where `skip` is 1."""
        for kept, buffer in zip(self.kept, self.buffers, strict=True):
            buffer.copy_(torch.where(skip > 0, kept, buffer))


class Average(ModelEmaV3):  # type: ignore[misc]
    """timm's moving average of a model, with an update that the device can leave out."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, decay=decay)
        self.pairs: list[tuple[Tensor, Tensor]] | None = None

    @torch.no_grad()
    def update_unless(self, skip: Tensor, model: nn.Module) -> None:
        """`update(model)` where `skip` is 0; where it is 1, nothing."""
        if self.pairs is None:  # the tensors stay the same ones to the end
            self.pairs = list(
                zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
            )
        averages = [average for average, _ in self.pairs if average.is_floating_point()]
        values = [value for average, value in self.pairs if average.is_floating_point()]
        moves = torch._foreach_sub(values, averages)
        torch._foreach_mul_(moves, (1 - self.decay) * (1 - skip))
        torch._foreach_add_(averages, moves)
        for average, value in self.pairs:
            if not average.is_floating_point():
                average.copy_(value)
