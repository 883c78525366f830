"""Runs of two processes for test_sharded.py, one after the other, as starting processes takes most of the time.

Argument: the folder of all runs, in which the run "alone" exists already. Started by torchrun.
"""

import resource
import shutil
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from pale.errors import NonFiniteError
from pale.tasks.classification.task import ClassificationTask
from pale.train.distributed import World, exit_process, join
from pale.train.loop import train

if __name__ == "__main__":
    # Not importable by name from here, as torchrun starts this file as a script.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.recipes import classification_recipe

# What is hard: pieces, blocks computed again, positions of which one process has none, uneven validation batches.
HARD = {"epochs": 1, "accumulate": 2, "model__checkpointing": True, "model__position": "ape"}
COUNTS = {"data__val_samples": 17, "saving__keep": 9, "saving__every_steps": 2}


def copy(source: Path, target: Path, last: int, world: World) -> None:
    """Return a copy of a run as it was after `last` steps."""
    if world.main:
        shutil.copytree(source, target)
        for path in (target / "checkpoints").iterdir():
            if int(path.name.removeprefix("step_")) > last:
                shutil.rmtree(path)
    dist.barrier()


def fill_the_disk_of_one(folder: Path, world: World) -> None:
    """Train while the second process can write at most 40 kB per file; print the message of the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    words = "none"
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        train(classification_recipe(parallel="fsdp", **COUNTS), folder / "full", world, quiet=True)
    except OSError as error:
        words = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (folder / f"full{world.rank}.txt").write_text(words)


def poison_one(folder: Path, world: World, parallel: str) -> None:
    """Train with a NaN loss on the second process in step 4, checked later if models are whole; print the error."""
    plain, calls = ClassificationTask.loss, 0

    def loss(self, model, batch):
        nonlocal calls
        calls += 1
        return plain(self, model, batch) * (float("nan") if (world.rank, calls) == (1, 5) else 1)

    ClassificationTask.loss = loss
    words = "none"
    try:
        recipe = classification_recipe(log_every=100, parallel=parallel)
        train(recipe, folder / f"bad_{parallel}", world, quiet=True, delayed=True)
    except NonFiniteError as error:
        words = str(error)
    ClassificationTask.loss = plain
    (folder / f"bad_{parallel}{world.rank}.txt").write_text(words)


def main(folder: Path) -> None:
    with join("cpu") as world:

        def run(name: str, resume: bool = False, **changes: object) -> None:
            train(
                classification_recipe(**COUNTS, **changes), folder / name, world, resume, quiet=True
            )

        run("fsdp", parallel="fsdp")
        run("hard", parallel="fsdp", **HARD)
        run("bf16_fsdp", parallel="fsdp", precision="bf16", epochs=1)
        copy(folder / "fsdp", folder / "resumed", 4, world)
        run("resumed", resume=True, parallel="fsdp")
        copy(folder / "alone", folder / "into_shards", 4, world)
        run("into_shards", resume=True, parallel="fsdp")
        copy(folder / "fsdp", folder / "out_of_shards", 4, world)
        run("out_of_shards", resume=True)
        fill_the_disk_of_one(folder, world)
        poison_one(folder, world, "ddp")
        poison_one(folder, world, "fsdp")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_process(0)
