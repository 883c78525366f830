"""Trains in child processes and kills them: SIGKILL, at random times or inside the writing of a checkpoint.

Imports once and forks, so that a run costs a second or two. Arguments: folder, recipe file, seed, kills at
random times, then the fsync calls at which to kill. Prints one JSON line for each kill.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from pale.cli import main

LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT  # whether it has ended, and leave that to be waited for


def start(argv: list[str], at_fsync: int | None = None) -> int:
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    if at_fsync is not None:
        kill_at_fsync(at_fsync)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        code = main(argv)
    os._exit(code)


def kill_at_fsync(number: int) -> None:
    plain, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(descriptor)

    os.fsync = fsync


def finish(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def go_on(run: Path, fresh: list[str]) -> int:
    begun = (run / "recipe.yaml").exists()
    return finish(start(["train", "--resume", str(run)] if begun else fresh))


def state(run: Path) -> dict:
    folder = run / "checkpoints"
    return {
        "begun": (run / "recipe.yaml").exists(),
        "checkpoints": len(list(folder.glob("step_*"))),
        "writing": len(list(folder.glob(".step_*"))),
    }


def lines(run: Path) -> int:
    """Steps that a run has logged."""
    path = run / "log.jsonl"
    return path.read_text().count('"event": "step"') if path.exists() else 0


def tell(what: dict) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def work(folder: Path, recipe: str, seed: int, kills: int, fsyncs: list[int]) -> None:
    rng = random.Random(seed)

    def command(run: Path) -> list[str]:
        return ["train", "--config", recipe, "--output", str(run)]

    began = time.monotonic()
    assert finish(start(command(folder / "whole"))) == 0
    whole, steps = time.monotonic() - began, lines(folder / "whole")
    for i in range(kills):
        run = folder / f"random{i}"
        child = start(command(run))
        # By steps, not by seconds: how long a run takes depends on what else runs here. -1: before the first.
        step = rng.randrange(-1, steps - 2)
        delay = rng.uniform(0, whole / steps)
        while lines(run) <= step and os.waitid(os.P_PID, child, LOOK) is None:
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        died = finish(child) == -signal.SIGKILL
        told = {"run": run.name, "seed": seed, "step": step, "seconds": delay, "died": died}
        told |= state(run)
        tell(told)
        assert go_on(run, command(run)) == 0
    for number in fsyncs:
        run = folder / f"fsync{number}"
        died = finish(start(command(run), number)) == -signal.SIGKILL
        tell({"run": run.name, "died": died, **state(run)})
        assert go_on(run, command(run)) == 0


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5]), [int(n) for n in sys.argv[5:]])
