"""Evaluation over the validation set, each image once, shared out over the processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from ..data.labelled import batches, make_loader
from ..data.plans import Plan
from ..progress import Track, silent
from ..tasks import Metric, Task
from .distributed import World
from .sharded import reshard


class Share(Sampler[list[tuple[int, int]]]):
    """The validation keys of one process, in batches.

    Args:
        samples: size of the validation set.
        batch: images a batch.
        world: the processes.
        even: as many batches on each process, for models whose forward pass all processes make together; from
            number `own` on they do not count.
        only: the images that count, by number; none: all.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        world: World,
        even: bool = False,
        only: Sequence[int] | None = None,
    ) -> None:
        chosen = range(samples) if only is None else only
        samples = len(chosen)
        self.indices = chosen[world.rank :: world.size]
        self.batch = batch
        self.own = -(-len(self.indices) // batch)
        most = -(-samples // world.size)  # images of the first process
        self.batches = -(-most // batch) if even else self.own

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for i in range(0, len(self.indices), self.batch):
            yield [(0, index) for index in self.indices[i : i + self.batch]]
        for _ in range(self.own, self.batches):
            yield [(0, 0)]


class Evaluation:
    """The validation set of a task.

    Args:
        task: whose data and metric.
        world: the processes.
        batch: images a batch.
        workers: reading processes; they stay between evaluations, as starting them costs more than a small set.
        even: see `Share`.
        only: see `Share`.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        batch: int,
        workers: int,
        even: bool = False,
        only: Sequence[int] | None = None,
    ) -> None:
        self.task, self.world, self.even = task, world, even
        data = task.val_data()
        self.share = Share(len(data), batch, world, even, only)  # type: ignore[arg-type]
        pin = world.device.type == "cuda"
        self.loader = make_loader(data, self.share, task.collate, workers, pin, persistent=True)

    @torch.no_grad()
    def run(
        self, model: nn.Module, dtype: torch.dtype | None, track: Track = silent
    ) -> tuple[dict[str, float], Metric]:
        """The figures, the same on every process, and the metric that collected them."""
        training, metric = model.training, self.task.metric()
        error: ValueError | None = None
        model.eval()
        try:
            reading = track(batches(self.loader), "evaluating", len(self.share))
            for i, batch in enumerate(reading):
                prepared = self.task.prepare(to_device(batch, self.world.device), None)
                counts = metric if i < self.share.own else self.task.metric()
                with autocast(self.world.device, dtype):
                    counts.update(model, prepared)
        except ValueError as caught:  # of the data
            if self.even:  # the others are inside a forward pass
                raise
            error = caught
        finally:
            model.train(training)
            reshard(model)
        self.world.agree(error)
        return metric.merge(self.world.gather(metric.state())), metric


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The tensors of a batch on the device, but for the keys."""
    return {
        name: value.to(device, non_blocking=True)
        if isinstance(value, torch.Tensor | Plan) and name != "keys"
        else value
        for name, value in batch.items()
    }


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Mixed precision in `dtype`, or none."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)
