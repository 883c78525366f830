"""Measure weights on the validation set that their recipe names, or on a sample of it."""

from __future__ import annotations

from pathlib import Path

from ..train.distributed import World
from ..train.evaluate import Sample, evaluate_weights
from .publish import read


def measure(
    source: Path,
    root: Path,
    world: World,
    *,
    sample: int | None = None,
    seed: int = 0,
    batch: int = 32,
    workers: int = 0,
    folder: Path | None = None,
) -> dict[str, float]:
    """Return the figures of the metric in float32, as `pale eval` does for the first protocol.

    Args:
        source: a run, a file, or a name in the index of the folder.
        root: root of the data.
        world: the processes, and the device.
        sample: number of images, drawn with `seed`; None: all.
        seed: seed of the sample.
        batch: images per batch.
        workers: reading processes.
        folder: where names are looked up.
    """
    weights, recipe = read(source, folder=folder)
    recipe = recipe.override({"data.root": str(root)})
    chosen = None if sample is None else Sample(sample, seed)
    found = evaluate_weights(
        recipe, weights, source, world, batch=batch, workers=workers, sample=chosen
    )
    return next(found).figures
