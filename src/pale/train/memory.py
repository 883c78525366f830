"""Advice for a run that is out of memory: settings that need less, with their current values."""

from __future__ import annotations

from pathlib import Path

from ..core.memory import Memory, short_reason
from ..core.settings import find_value
from ..errors import MemoryShortageError
from ..recipes.schema import Recipe
from .distributed import World

MAX_ACCUMULATE = 1024
SMALLEST = "pale_nano"
IMAGE_SIZES = ("augment.crop", "augment.short", "data.size")


def training_shortage(
    memory: Memory,
    error: BaseException,
    recipe: Recipe,
    world: World,
    run: Path,
    step: int | None,
) -> MemoryShortageError:
    """Return an error that lists settings which need less memory.

    Args:
        memory: which memory ran out.
        error: the allocator's error.
        recipe: settings of the run.
        world: its processes.
        run: its folder.
        step: current step; None if the run had not started.
    """
    parts = world.size * recipe.accumulate
    at = "while the run was set up" if step is None else f"at step {step}"
    ways = _smaller_settings(recipe, world) if memory == "GPU" or world.device.type == "cpu" else []
    if memory == "host" and recipe.workers:
        ways.insert(0, f"--data.workers {recipe.workers // 2} (now {recipe.workers})")
    ways.append(f"a smaller --batch (now {recipe.batch}; in a new run)")
    first = ways[0].partition(" (")[0]
    started = step is not None and (run / "log.jsonl").exists()
    again = f"pale train --resume {run} {first}" if started else f"the same command with {first}"
    return MemoryShortageError(
        f"out of {memory} memory {at} ({short_reason(error)}). A process computes {max(1, recipe.batch // parts)} "
        f"images at a time: batch {recipe.batch} in {parts} parts ({world.size} processes x accumulate "
        f"{recipe.accumulate}). Each of these needs less memory: {'; '.join(ways)}. Then: {again}"
    )


def too_little_memory(
    recipe: Recipe, world: World, needed: int, available: int
) -> MemoryShortageError:
    """Return an error before the first step of a run whose estimated memory is not available.

    Args:
        recipe: settings of the run.
        world: its processes.
        needed: estimate, in bytes.
        available: bytes.
    """
    ways = _smaller_settings(recipe, world)
    ways.append(f"a smaller --batch (now {recipe.batch})")
    if recipe.model.name != SMALLEST:
        ways.append(f"a smaller model, --model.name {SMALLEST} (now {recipe.model.name})")
    return MemoryShortageError(
        f"a step needs about {needed / 1e9:.1f} GB of host memory, {available / 1e9:.1f} GB are available; the system "
        f"would kill the run without a message. Each of these needs less memory: {'; '.join(ways)}. For a few hundred "
        "images: pale train finetune"
    )


def _smaller_settings(recipe: Recipe, world: World) -> list[str]:
    """Return settings that reduce the memory of a step; those that do not change the result come first."""
    ways = []
    if (parts := _next_accumulate(recipe, world)) is not None:
        ways.append(f"--accumulate {parts} (now {recipe.accumulate}; same result)")
    if not recipe.model.checkpointing:
        ways.append("--model.checkpointing true (now false; slower, same result)")
    if world.device.type == "cuda" and recipe.precision == "fp32":
        ways.append("--precision bf16 (now fp32)")
    if world.size > 1 and recipe.parallel == "ddp":
        ways.append("--parallel fsdp (now ddp)")
    for name in IMAGE_SIZES:
        if (value := find_value(recipe, name)) is not None:
            ways.append(f"smaller images, --{name} (now {value})")
            break
    return ways


def _next_accumulate(recipe: Recipe, world: World) -> int | None:
    """Return the next larger `accumulate` that divides the batch, or None."""
    for parts in range(recipe.accumulate + 1, min(recipe.batch // world.size, MAX_ACCUMULATE) + 1):
        if recipe.batch % (parts * world.size):
            continue
        try:
            recipe.override({"accumulate": parts}).check_batch_split(world.size)
        except ValueError:  # the task does not support parts of this size
            continue
        return parts
    return None
