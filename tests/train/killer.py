"""Train in child processes, kill them with SIGKILL and compare their final states: `python killer.py --help`.

Imports once and forks, so that a run takes a second or two. A kill happens at a random time, or while a checkpoint is
written; a run is killed up to three times before it may end. Prints one JSON line for each kill and one for each run,
which lists the differences from the run that was not killed.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from pale.cli.main import main
from pale.train.log import read

LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT  # whether it has ended, and leave that to be waited for
KILLS_OF_A_RUN = 3
LAST_FSYNC = 18  # two checkpoints of one process, and some files beside them


def start(argv: list[str], processes: int = 1, at_fsync: int | None = None) -> list[int]:
    """Start the processes of a run; the first kills itself at the given call of fsync, if any."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        if child := os.fork():
            children.append(child)
            continue
        torch.set_num_threads(1)
        if processes > 1:
            several = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
            several |= {"LOCAL_WORLD_SIZE": processes, "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in several.items()}
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        if at_fsync is not None and rank == 0:
            kill_at_fsync(at_fsync)
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            code = main(argv)
        os._exit(code)
    return children


def kill_at_fsync(number: int) -> None:
    plain, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(descriptor)

    os.fsync = fsync


def finish(children: Sequence[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, LOOK) is not None


def end_all(children: Sequence[int]) -> bool:
    """Kill the other processes once one was killed, as torchrun does; return whether one was."""
    while not any(ended(child) for child in children):
        time.sleep(0.002)
    first = [child for child in children if ended(child)]
    for child in children:
        if child not in first:
            os.kill(child, signal.SIGKILL)
    codes = dict(zip(children, finish(children), strict=True))
    return any(codes[child] == -signal.SIGKILL for child in first)


def command(run: Path, recipe: str) -> list[str]:
    started = (run / "recipe.yaml").exists()
    how = ["--resume", str(run)] if started else ["--config", recipe, "--output", str(run)]
    return ["train", *how, "--device", "cpu"]


def state(run: Path) -> dict:
    folder = run / "checkpoints"
    return {
        "started": (run / "recipe.yaml").exists(),
        "checkpoints": len(list(folder.glob("step_*"))),
        "writing": len(list(folder.glob(".step_*"))),
    }


def lines(run: Path) -> int:
    """Return the number of steps that a run has logged."""
    path = run / "log.jsonl"
    return path.read_text().count('"event": "step"') if path.exists() else 0


def report(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def kill_at_random(
    run: Path, args: argparse.Namespace, rng: random.Random, steps: int, seconds: float
) -> bool:
    """Kill after a random number of steps and a fraction of a step; -1: before the first."""
    # By steps, not by seconds: how long a run takes depends on what else runs here.
    step, delay = rng.randrange(-1, steps - 2), rng.uniform(0, seconds)
    children = start(command(run, args.recipe), args.processes)
    while lines(run) <= step and not any(ended(child) for child in children):
        time.sleep(0.002)
    time.sleep(delay)
    victims = rng.choice([[child] for child in children] + [children] * (args.processes > 1))
    for child in victims:
        if not ended(child):
            os.kill(child, signal.SIGKILL)
    died = end_all(children)
    report(run=run.name, way="random", step=step, seconds=round(delay, 4), died=died, **state(run))
    return died


def kill_while_writing(run: Path, args: argparse.Namespace, number: int) -> bool:
    died = end_all(start(command(run, args.recipe), args.processes, number))
    report(run=run.name, way="fsync", call=number, died=died, **state(run))
    return died


def final(run: Path) -> dict:
    """Return the final state of a run."""
    path = max((run / "checkpoints").glob("step_*"))
    trainer = torch.load(path / "trainer.pt", weights_only=True)
    events = read(run / "log.jsonl")
    tensors = {f"model.{n}": x for n, x in load_file(path / "model.safetensors").items()}
    tensors |= {f"ema.{n}": x for n, x in load_file(path / "ema.safetensors").items()}
    for i, values in trainer["optimizer"]["state"].items():
        tensors |= {f"optimizer.{i}.{name}": value for name, value in values.items()}
    curve = [(e["step"], e["loss"], e["lr"]) for e in events if e["event"] == "step"]
    figures = [entry for entry in events if entry["event"] == "eval"]
    rest = {name: trainer[name] for name in ("step", "figures", "best")}
    rest |= {"groups": trainer["optimizer"]["param_groups"], "curve": curve, "evaluations": figures}
    return {"tensors": tensors, "rest": rest}


def differences(one: dict, two: dict) -> list[str]:
    """Return the names of values that are not bit-equal."""
    names = sorted(one["tensors"].keys() | two["tensors"].keys())
    differ = []
    for name in names:
        a, b = one["tensors"].get(name), two["tensors"].get(name)
        if a is None or b is None or a.dtype != b.dtype or not torch.equal(a, b):
            differ.append(name)
    # Compare the text, in which NaN equals NaN.
    return differ + [n for n, value in one["rest"].items() if repr(value) != repr(two["rest"][n])]


def work(args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    began = time.monotonic()
    codes = finish(start(command(args.folder / "whole", args.recipe), args.processes))
    assert set(codes) == {0}, codes
    whole, steps = time.monotonic() - began, lines(args.folder / "whole")
    runs: dict[str, int] = {}
    hits = tries = 0
    while hits < args.kills and tries < 2 * args.kills:
        run = args.folder / f"run{len(runs)}"
        own = 0
        for _ in range(min(rng.randint(1, KILLS_OF_A_RUN), args.kills - hits)):
            if rng.random() < args.writing:
                own += kill_while_writing(run, args, rng.randint(1, LAST_FSYNC))
            else:
                own += kill_at_random(run, args, rng, steps, whole / steps)
            tries += 1
        hits, runs[run.name] = hits + own, own
        codes = finish(start(command(run, args.recipe), args.processes))
        assert set(codes) == {0}, (run, codes)
    for number in args.fsync:
        run = args.folder / f"fsync{number}"
        runs[run.name] = kill_while_writing(run, args, number)
        assert set(finish(start(command(run, args.recipe), args.processes))) == {0}
    # After the last fork: comparing may start threads.
    expected = final(args.folder / "whole")
    for name, kills in runs.items():
        differ = differences(expected, final(args.folder / name))
        report(compared=name, kills=kills, tensors=len(expected["tensors"]), differ=differ[:8])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0, help="that hit a live run")
    parser.add_argument("--writing", type=float, default=0.25, help="share of them inside a write")
    parser.add_argument("--fsync", type=int, nargs="*", default=[], help="also kill at these calls")
    work(parser.parse_args())
