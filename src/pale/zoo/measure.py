"""What weights are worth on the validation set that their recipe names, or on a sample of it."""

from __future__ import annotations

import random
from pathlib import Path

from .. import weights as weight_files
from ..train.distributed import World
from ..train.evaluate import Evaluation
from .folder import read


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
    """The metric's figures, in float32, as `pale eval` gives them.

    Args:
        source: a run, a file, or a name that the folder's index lists.
        root: of the data.
        world: the processes, and the device.
        sample: so many pictures, drawn with `seed`; none: all.
        seed: of the sample.
        batch: pictures at a time.
        workers: reading processes.
        folder: where names are looked up.
    """
    weights, recipe = read(source, folder=folder)
    recipe = recipe.override({"data.root": str(root)})
    task = recipe.task(weights.about.get("classes"))
    model = task.model()
    weight_files.put(model, weights, source, new_head=False)
    count = len(task.val_data())  # type: ignore[arg-type]
    only = None
    if sample is not None and sample < count:
        only = sorted(random.Random(seed).sample(range(count), sample))
    evaluation = Evaluation(task, world, batch, workers, only=only)
    figures, _ = evaluation.run(model.to(world.device), None)
    return figures
