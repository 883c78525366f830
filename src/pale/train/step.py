"""One optimisation step: accumulate gradients, check them, clip them, update weights and moving average.

A step depends only on the recipe, the weights before it and its number: samples, augmentation, mixing and drop path
are drawn from (seed, epoch, sample) and (seed, step) over the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.loader import Batch
from ..data.seeding import derive_seed
from ..data.stream import StreamSampler
from ..recipes.schema import Recipe
from ..tasks.base import Task
from .distributed import World
from .drop_path import DropPaths
from .evaluate import autocast, to_device
from .graphed import GraphedStep, record_part
from .guard import BatchNormBackup, Guard, StepRecord
from .optim import Schedule, make_schedule
from .sharded import gather_tensor
from .state import TrainState, compute_dtype

MAX_CONSECUTIVE_SKIPS = 10


@dataclass(frozen=True)
class StepResult:
    """Loss on this process and gradient norm before clipping, both on the device."""

    loss: Tensor
    grad_norm: Tensor


@dataclass
class Network:
    """The model in the form that a step calls.

    Attributes:
        forward: the model, wrapped by DDP or compiled.
        ddp: the wrapper of several processes, or None.
        drop_paths: masks of drop path.
    """

    forward: nn.Module
    ddp: DistributedDataParallel | None
    drop_paths: DropPaths


class TrainStep:
    """Make optimisation steps.

    Args:
        recipe: settings of the run.
        world: the processes.
        task: prepares batches and computes the loss.
        state: changed by each step.
        sampler: order of the samples of this process.
        network: the model in the form that a step calls.
        guard: checks steps without waiting for the device; None: each step is checked immediately.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        task: Task,
        state: TrainState,
        sampler: StreamSampler,
        network: Network,
        guard: Guard | None,
    ) -> None:
        self.recipe, self.world, self.task, self.state = recipe, world, task, state
        self.sampler, self.network, self.guard = sampler, network, guard
        self.dtype = compute_dtype(recipe.precision, world.device)
        self.uses_cuda_graph = recipe.uses_cuda_graph(world.device.type == "cuda", world.size)
        # Collected once: walking the modules takes longer than a small kernel.
        self.parameters = list(state.model.parameters())
        self.batch_norms = BatchNormBackup(state.model)
        self.schedule: Schedule = make_schedule(
            state.optimizer, recipe, sampler.stream.steps, sampler.stream.samples
        )
        self.graphed: GraphedStep | None = None
        self.part_recorded = False
        self._checked: list[StepRecord] = []

    def run(self, batches: Iterator[Batch]) -> StepResult:
        """Make one step with the next `accumulate` batches."""
        state, world = self.state, self.world
        self.schedule.step_update(state.step)
        self.batch_norms.save()
        losses, keys = self._accumulate(batches)
        if world.size > 1 and self.network.ddp is None and not state.sharded:
            world.average_([p.grad for p in self.parameters if p.grad is not None])
        state.scaler.unscale_(state.optimizer)
        clip = self.recipe.optim.clip or math.inf
        norm = gather_tensor(nn.utils.clip_grad_norm_(self.parameters, clip))
        loss = torch.stack(losses).mean()
        self._update(loss, norm, torch.cat(keys))
        self.zero_grad()
        state.step += 1
        return StepResult(loss, norm)

    def completed(self, lag: int) -> Iterator[StepRecord]:
        """Yield the records of steps not yet yielded, in order; with a guard, all except the last `lag`."""
        checked, self._checked = self._checked, []
        yield from checked
        if self.guard is not None:
            yield from self.guard.completed(lag)

    def rewind(self, step: int) -> None:
        """Go back to `step`, the first of the last steps that were skipped: the weights are still those before it."""
        self.zero_grad()
        self.state.step = step
        if self.guard is not None:
            self.guard.pending.clear()

    def forget_shapes(self) -> None:
        """Record and compile the step anew at its next batch, whose images may have another size."""
        if self.graphed is not None:
            self.graphed = None
            self.state.optimizer.zero_grad()  # of the graph
        if self.recipe.compile and self.state.step:
            torch.compiler.reset()  # compiles for the new size, and not for all sizes

    def zero_grad(self) -> None:
        """Reset the gradients."""
        if self.graphed:
            self.graphed.zero_grad()
        else:
            self.state.optimizer.zero_grad()

    def _accumulate(self, batches: Iterator[Batch]) -> tuple[list[Tensor], list[Tensor]]:
        """Add up the gradients of all parts of a batch; return their losses and the keys of their samples."""
        recipe, world, step, ddp = self.recipe, self.world, self.state.step, self.network.ddp
        losses, keys = [], []
        for i, positions in enumerate(self.sampler.positions):
            batch = next(batches)
            keys.append(batch["keys"])
            torch.manual_seed(derive_seed(recipe.seed, step, world.rank * recipe.accumulate + i))
            self.network.drop_paths.draw(step, positions)
            batch = self.task.prepare(to_device(batch, world.device), step)
            last = i == recipe.accumulate - 1
            with nullcontext() if last or ddp is None else ddp.no_sync():
                losses.append(self._compute(batch))
        return losses, keys

    def _compute(self, batch: Batch) -> Tensor:
        """Return the loss of a prepared batch and add its gradients."""
        if not self.uses_cuda_graph:
            return self._forward_backward(batch)
        if (part := getattr(self.state.model, "recordable", None)) is not None:
            if not self.part_recorded:
                record_part(part, batch["images"], self.dtype)
                self.part_recorded = True
            return self._forward_backward(batch)
        if self.graphed is None:
            self.graphed = GraphedStep(self._forward_backward, self.state.model, batch)
        return self.graphed(batch)

    def _forward_backward(self, batch: Batch) -> Tensor:
        with autocast(self.world.device, self.dtype):
            loss = self.task.loss(self.network.forward, batch)
        self.state.scaler.scale(loss / self.recipe.accumulate).backward()
        return loss.detach()

    def _update(self, loss: Tensor, norm: Tensor, keys: Tensor) -> None:
        """Update weights and moving average, unless loss or gradient is NaN or Inf."""
        state = self.state
        if self.guard is not None:
            skip = self.guard.check(state.step, state.lr, keys, loss, norm)
            state.optimizer.found_inf = skip  # type: ignore[union-attr]
            state.optimizer.step()
            self.batch_norms.restore_if(skip)
            if state.ema:
                state.ema.update_unless(skip, state.model)
            return
        mean, length = loss.item(), norm.item()
        # With fp16 an infinite gradient is normal: the scaler skips the step and lowers the scale.
        bad = not math.isfinite(mean) or not (state.scaler.is_enabled() or math.isfinite(length))
        anywhere = self.world.any(bad)[0]
        record = StepRecord(state.step, state.lr, keys, mean, length, anywhere, bad)
        self._checked.append(record)
        if anywhere:  # the scaler is updated only if the run continues
            self.batch_norms.restore_if(torch.ones_like(loss))
            return
        state.scaler.step(state.optimizer)
        if state.ema:
            state.ema.update(state.model)
        state.scaler.update()


def build_step(
    recipe: Recipe,
    world: World,
    task: Task,
    state: TrainState,
    sampler: StreamSampler,
    delayed: bool | None,
) -> TrainStep:
    """Wrap or compile the model and set up drop path.

    Args:
        recipe: settings of the run.
        world: the processes.
        task: prepares batches and computes the loss.
        state: state of the run.
        sampler: order of the samples of this process.
        delayed: check each step one step later (see `guard.py`); None: on CUDA only, where an immediate check makes the
            CPU wait. fp16 and shards are always checked immediately.
    """
    part = recipe.batch // (world.size * recipe.accumulate)
    drop_paths = DropPaths(state.model, recipe.batch, part, recipe.seed)
    wanted = world.device.type == "cuda" if delayed is None else delayed
    limit = MAX_CONSECUTIVE_SKIPS if recipe.on_nonfinite == "skip" else 1
    immediate = state.scaler.is_enabled() or state.sharded
    guard = Guard(world, limit) if wanted and not immediate else None
    # The hooks of DDP in a backward pass cannot be recorded: then gradients are averaged after it.
    uses_ddp = world.size > 1 and not state.sharded and recipe.cuda_graph is not True
    ddp = DistributedDataParallel(state.model) if uses_ddp else None
    forward: nn.Module = ddp or state.model
    if recipe.compile and not state.sharded:
        # Models with varying shapes compile only some of their parts.
        compile_parts = getattr(state.model, "compile_parts", None)
        if compile_parts is not None:
            compile_parts()
        else:
            forward = cast("nn.Module", torch.compile(forward))
    network = Network(forward, ddp, drop_paths)
    return TrainStep(recipe, world, task, state, sampler, network, guard)
