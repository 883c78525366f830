"""Evaluation over the validation set, each image once, shared out over the processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from ..data.labelled import batches, make_loader
from ..tasks import Metric, Task
from .distributed import World


class Share(Sampler[list[tuple[int, int]]]):
    """The validation keys of one process, in batches."""

    def __init__(self, samples: int, batch: int, world: World) -> None:
        self.indices = range(world.rank, samples, world.size)
        self.batch = batch

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for i in range(0, len(self.indices), self.batch):
            yield [(0, index) for index in self.indices[i : i + self.batch]]


class Evaluation:
    """The validation set of a task, loaded again for each evaluation."""

    def __init__(self, task: Task, world: World, batch: int, workers: int) -> None:
        self.task, self.world = task, world
        data = task.val_data()
        share = Share(len(data), batch, world)  # type: ignore[arg-type]
        pin = world.device.type == "cuda"
        self.loader = make_loader(data, share, task.collate, workers, pin)

    @torch.no_grad()
    def run(self, model: nn.Module, dtype: torch.dtype | None) -> tuple[dict[str, float], Metric]:
        """The figures, the same on every process, and the metric that collected them."""
        training, metric = model.training, self.task.metric()
        model.eval()
        try:
            for batch in batches(self.loader):
                prepared = self.task.prepare(to_device(batch, self.world.device), None)
                with autocast(self.world.device, dtype):
                    metric.update(model, prepared)
        finally:
            model.train(training)
        return metric.merge(self.world.gather(metric.state())), metric


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The tensors of a batch on the device, but for the keys."""
    return {
        name: value.to(device, non_blocking=True)
        if isinstance(value, torch.Tensor) and name != "keys"
        else value
        for name, value in batch.items()
    }


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Mixed precision in `dtype`, or none."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)
