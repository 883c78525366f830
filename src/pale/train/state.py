"""State of a run, which checkpoints hold: build, save and restore it.

Random numbers derive from (seed, step), so the state holds no random generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from ..recipes.schema import Recipe
from ..tasks.base import Task
from ..tasks.freezing import freeze_parameters
from . import checkpoint, sharded
from .background import copy_to_cpu
from .distributed import World
from .guard import MovingAverage
from .muon import Muon
from .optim import make_optimizer
from .sync_batch_norm import sync_batch_norms


@dataclass
class TrainState:
    """Models, optimizer and progress of a run.

    Attributes:
        model: the trained model.
        ema: moving average of its weights, or None.
        optimizer: AdamW or Muon.
        scaler: loss scaling, enabled for fp16 only.
        sharded: whether the models are in shards over all processes.
        step: steps done.
        evaluated: step of the last evaluation.
        best: best score so far.
        figures: results of the last evaluation.
    """

    model: nn.Module
    ema: MovingAverage | None
    optimizer: AdamW | Muon
    scaler: torch.amp.GradScaler
    sharded: bool
    step: int = 0
    evaluated: int = 0
    best: float = -math.inf
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def models(self) -> dict[str, nn.Module]:
        """Models of a checkpoint by name, "model" and "ema"."""
        return {"model": self.model} | ({"ema": self.ema.module} if self.ema else {})

    @property
    def evaluated_model(self) -> nn.Module:
        """The moving average if there is one, else the model."""
        return self.ema.module if self.ema else self.model

    @property
    def lr(self) -> float:
        """The largest learning rate of all parameter groups."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def save_shards(self, folder: Path, world: World, identity: Mapping[str, object]) -> None:
        """Write a checkpoint of sharded models on all processes.

        Args:
            folder: folder of all checkpoints of the run.
            world: the processes.
            identity: batch size, seed and dataset, which must be the same when the run resumes.
        """
        state = self._progress(identity)
        sharded.save(folder, self.step, self.models, self.optimizer, state, world)

    def checkpoint_writer(
        self, folder: Path, identity: Mapping[str, object], about: Mapping[str, object], copy: bool
    ) -> Callable[[], Path]:
        """Return a function that writes a checkpoint of models that are not sharded.

        Args:
            folder: folder of all checkpoints of the run.
            identity: batch size, seed and dataset, which must be the same when the run resumes.
            about: header of the weights.
            copy: copy the state now, so that it may change before the function is called.
        """
        models = {name: model.state_dict() for name, model in self.models.items()}
        state = self._progress(identity) | {"optimizer": self.optimizer.state_dict()}
        if copy:
            models, state = copy_to_cpu(models), copy_to_cpu(state)
        return partial(checkpoint.save, folder, self.step, models, state, about)

    def _progress(self, identity: Mapping[str, object]) -> dict[str, Any]:
        """Return what a checkpoint holds beside models and optimizer."""
        return {
            **identity,
            "step": self.step,
            "evaluated": self.evaluated,
            "best": self.best,
            "figures": self.figures,
            "scaler": self.scaler.state_dict(),
        }

    def restore(
        self, path: Path, device: torch.device, check: Callable[[dict[str, Any]], None]
    ) -> None:
        """Load a checkpoint.

        Args:
            path: folder of the checkpoint.
            device: device for the optimizer state.
            check: called with the saved values before anything changes; raises if they do not fit the run.
        """
        state = sharded.restore(path, self.models, self.optimizer, device, check)
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.evaluated = state["step"], state["evaluated"]
        self.best, self.figures = state["best"], state["figures"]

    def is_finite(self) -> bool:
        """Return whether all weights that this process holds are finite."""
        return all(sharded.is_finite(model) for model in self.models.values())


def build_state(recipe: Recipe, task: Task, world: World) -> TrainState:
    """Build models and optimizer of a new run; the same on every process."""
    dtype = compute_dtype(recipe.precision, world.device)
    is_sharded = recipe.parallel == "fsdp" and world.size > 1
    with torch.random.fork_rng(devices=[]):  # models are built on the CPU
        torch.manual_seed(recipe.seed)
        model = sync_batch_norms(task.model(), world).train()
    freeze_parameters(model, recipe.model.freeze)
    if not is_sharded:  # otherwise it may not fit
        model.to(world.device)
    ema = MovingAverage(model, recipe.ema) if recipe.ema else None
    if is_sharded:
        sharded.shard(model, world, dtype, recipe.compile)
        if ema is not None:
            sharded.shard(ema.module, world, dtype)
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16)
    return TrainState(model, ema, make_optimizer(model, recipe), scaler, is_sharded)


def compute_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the type of mixed precision, None for float32."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else None
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[precision]
