"""Checks before the first step: unsuitable settings, and insufficient memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import Dataset

from ..core.lists import list_first
from ..core.memory import available_memory
from ..data.stream import Stream
from ..recipes.schema import Recipe
from ..tasks.base import Task
from .distributed import World
from .evaluate import autocast, to_device
from .memory import too_little_memory
from .state import TrainState, compute_dtype

FEW_STEPS = 300
FEW_IMAGES = 5  # minimum number of images of a class
UNEVEN = 10  # ratio of the numbers of images of two classes
PROBED = 2  # images of the forward pass that memory is estimated with
# Peak memory of a step relative to the activations kept for the backward pass: gradients of activations, buffers of
# the allocator. Measured with Pale-T and pale_nano on a CPU.
PEAK = 1.4
MARGIN = 0.9  # share of the estimate that must be available, because it is not exact


def find_warnings(recipe: Recipe, stream: Stream, task: Task) -> list[str]:
    """Return warnings about the length of a run and its number of images."""
    found = []
    if recipe.batch > stream.samples:
        found.append(
            f"batch {recipe.batch} is larger than the training set of {stream.samples} images, so an image occurs "
            f"several times in a step; set --batch {max(stream.samples // 4, 1)} or smaller"
        )
    if stream.steps < FEW_STEPS:
        found.append(
            f"the run has {stream.steps} steps; fewer than {FEW_STEPS} rarely suffice: {_more_steps(recipe)}"
        )
    counts = task.class_counts()
    if few := {name: n for name, n in counts.items() if n < FEW_IMAGES}:
        listed = list_first([f"{name}: {n}" for name, n in few.items()], 5)
        found.append(
            f"classes with fewer than {FEW_IMAGES} training images ({listed}) are learned poorly; add images "
            "or merge classes"
        )
    if counts and max(counts.values()) > UNEVEN * min(counts.values()):
        most, least = (choose(counts, key=counts.__getitem__) for choose in (max, min))
        found.append(
            f"uneven classes ({most}: {counts[most]} images, {least}: {counts[least]}): rare ones are learned poorly; "
            "set --data.balanced true, or add images"
        )
    return [f"warning: {text}" for text in found]


def _more_steps(recipe: Recipe) -> str:
    """Return which setting makes a run longer."""
    if recipe.steps is not None:
        return "raise --steps"
    if recipe.min_steps is not None:
        return "raise --min_steps"
    return "raise --epochs or lower --batch (pale train finetune chooses both)"


def require_memory(recipe: Recipe, world: World, estimate: Callable[[], int]) -> None:
    """Raise a `MemoryShortageError` if a step needs more memory than the machine has left; on a CPU, in one process.

    A GPU raises an out-of-memory error; the operating system kills a process without a message.

    Args:
        recipe: the recipe.
        world: the processes and their devices.
        estimate: `estimate_memory` with its arguments; it is called only where its result is needed.
    """
    if world.device.type != "cpu" or world.size > 1:
        return
    available = available_memory()
    if available is None:
        return
    try:
        needed = estimate()
    except (ValueError, OSError):  # an unreadable image, which the run itself reports
        return
    if MARGIN * needed > available:
        raise too_little_memory(recipe, world, needed, available)


def estimate_memory(
    recipe: Recipe,
    world: World,
    task: Task,
    data: Dataset[Any],
    stream: Stream,
    state: TrainState,
) -> int:
    """Return the additional bytes that training needs.

    These are gradients, moments of the optimizer, and the activations that one part of a batch keeps for the
    backward pass, measured with two images.
    """
    part = max(recipe.batch // recipe.accumulate, 1)
    keys = stream.keys(0, np.arange(PROBED))
    batch = task.collate([data[key] for key in keys])
    batch = task.fetched(batch, world.device)
    model = state.model
    known = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    buffers = {
        name: value.clone() for name, value in model.named_buffers()
    }  # batch norms change theirs
    dtype = compute_dtype(recipe.precision, world.device)
    with torch.random.fork_rng(devices=[]):
        prepared = task.prepare(to_device(batch, world.device), 0)
        with saved_tensors_hooks(count, lambda tensor: tensor), autocast(world.device, dtype):
            loss = task.loss(model, prepared)
        del loss
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return round(3 * trained + PEAK * sum(kept.values()) * part / PROBED)
