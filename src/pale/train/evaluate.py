"""Evaluation over the validation set, each image once, divided among the processes.

Training uses `Evaluation`; `pale eval`, the zoo and the benchmarks use `evaluate_weights`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Sampler

from ..core.progress import Track, no_progress
from ..data.gpu.plans import BatchPlan
from ..data.loader import Batch, iterate_batches, make_loader
from ..recipes.schema import Recipe
from ..tasks.base import Evaluated, Metric, Task
from ..tasks.building import build_for
from ..weights.compare import load_into
from ..weights.read import Weights
from .distributed import World
from .sharded import reshard


class ShareSampler(Sampler[list[tuple[int, int]]]):
    """The validation keys of one process, in batches.

    Args:
        samples: size of the validation set.
        batch: images per batch.
        world: the processes.
        even: the same number of batches on each process, for models whose forward pass needs all processes; batches
            from number `own` on do not count.
        only: indices of the images to evaluate; None: all.
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
        task: task with the data and the metric.
        world: the processes.
        batch: images per batch.
        workers: reading processes; they are kept between evaluations, because starting them takes longer than
            evaluating a small set.
        even: see `ShareSampler`.
        only: see `ShareSampler`.
        protocol: protocol of the task; "" is the protocol of validation during training.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        batch: int,
        workers: int,
        even: bool = False,
        only: Sequence[int] | None = None,
        protocol: str = "",
    ) -> None:
        self.task, self.world, self.even, self.protocol = task, world, even, protocol
        data = task.val_data()
        self.share = ShareSampler(len(data), batch, world, even, only)  # type: ignore[arg-type]
        pin = world.device.type == "cuda"
        self.loader = make_loader(data, self.share, task.collate, workers, pin, persistent=True)

    @torch.no_grad()
    def run(
        self, model: nn.Module, dtype: torch.dtype | None, track: Track = no_progress
    ) -> tuple[dict[str, float], Metric]:
        """Return the figures, the same on every process, and the metric that collected them."""
        training, metric = model.training, self.task.metric(self.protocol)
        error: ValueError | None = None
        model.eval()
        try:
            reading = track(iterate_batches(self.loader), "evaluating", len(self.share))
            for i, batch in enumerate(reading):
                prepared = self.task.prepare(to_device(batch, self.world.device), None)
                counts = metric if i < self.share.own else self.task.metric(self.protocol)
                with autocast(self.world.device, dtype):
                    counts.update(model, prepared)
        except ValueError as caught:  # about the data
            if self.even:  # the others are inside a forward pass
                raise
            error = caught
        finally:
            model.train(training)
            reshard(model)
        self.world.raise_on_all(error)
        return metric.merge(self.world.gather(metric.state())), metric


def evaluate_weights(
    recipe: Recipe,
    weights: Weights,
    source: Path,
    world: World,
    *,
    protocol: str = "both",
    batch: int = 1,
    workers: int | None = None,
    sample: Sample | None = None,
    track: Track = no_progress,
) -> Iterator[Evaluated]:
    """Build the model, load the weights, and evaluate each protocol in float32; every process gets the same results.

    Args:
        recipe: recipe of the weights, without weights to start from (`recipes.stored.without_start`).
        weights: weights to be evaluated.
        source: where they come from, for messages.
        world: the processes, and the device.
        protocol: name of one protocol of the task, or "both" for all; a task with a single protocol ignores it.
        batch: images per batch.
        workers: reading processes; None: as in the recipe.
        sample: evaluate some of the images only.
        track: shows progress.
    """
    task = recipe.task(weights.about.get("classes") or recipe.task_class.listed_classes(recipe))
    model = build_for(weights, task.model, source)
    load_into(model, weights, source, new_head=False)
    model.to(world.device)
    reported = recipe.reported.plain() if recipe.reported else {}
    paper = {name: value for name, value in reported.items() if value is not None}
    workers = recipe.workers if workers is None else workers
    only = None if sample is None else sample.indices(len(task.val_data()))  # type: ignore[arg-type]
    for name, how in task.protocols().items():
        if protocol in ("both", name) or not name:
            evaluation = Evaluation(task, world, batch, workers, only=only, protocol=name)
            figures, metric = evaluation.run(model, None, track)
            yield Evaluated(name, figures, metric, how, task, paper)


@dataclass(frozen=True)
class Sample:
    """A random sample of a validation set.

    Attributes:
        count: number of images; all if there are fewer.
        seed: seed of the draw.
    """

    count: int
    seed: int = 0

    def indices(self, total: int) -> list[int] | None:
        """Return the indices of the sample in order; None for all images."""
        if self.count >= total:
            return None
        return sorted(random.Random(self.seed).sample(range(total), self.count))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch to the device, except the keys."""
    return {
        name: value.to(device, non_blocking=True)
        if isinstance(value, torch.Tensor | BatchPlan) and name != "keys"
        else value
        for name, value in batch.items()
    }


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return a context of mixed precision in `dtype`; None: full precision."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)
