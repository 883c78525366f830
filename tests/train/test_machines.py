"""Training on several machines as docs/cluster.md describes: network namespaces with host names of their own."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.machines import Machine, has_ended, is_told_to_end, machines
from support.recipes import classification_recipe

from pale.recipes.files import recipe_to_yaml
from pale.train.distributed import World
from pale.train.log import read
from pale.train.loop import train

# 12 images can be split over one, two and three processes.
SETTINGS = {"data__val_samples": 13, "batch": 12, "data__samples": 48, "epochs": 3}
STEPS = 12
LONG = {"epochs": 30, "saving__every_steps": 10, "eval_every": 15}
LONG_STEPS = 120
DIST_TIMEOUT = 30  # seconds without an answer of the other machine, after which a process fails
TO_END = 40  # seconds that processes may need to end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def events(run: Path, event: str) -> list[dict]:
    return [entry for entry in read(run / "log.jsonl") if entry["event"] == event]


def losses(run: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in events(run, "step")}


def write_recipe(path: Path, **changes: object) -> Path:
    path.write_text(recipe_to_yaml(classification_recipe(**SETTINGS | changes)))
    return path


def wait_until(condition: Callable[[], bool], seconds: float, message: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{message} in {seconds} s"
        time.sleep(0.2)


def wait_for_step(run: Path, step: int, seconds: float = 120) -> None:
    message = f"step {step} was not reached"
    wait_until(lambda: max(losses(run), default=0) >= step, seconds, message)


def wait_for_processes(run: Path, count: int, seconds: float = 120) -> None:
    """Wait until a run of this number of processes has started."""
    message = f"no run of {count} processes started"
    wait_until(lambda: count in [e["processes"] for e in events(run, "start")], seconds, message)


def finish(started: list, hosts: list[Machine], seconds: float = 300) -> None:
    """Wait for commands that must succeed."""
    deadline = time.monotonic() + seconds
    for process in started:
        code = process.wait(max(deadline - time.monotonic(), 1))
        assert code == 0, "\n".join(host.output.read_text()[-2500:] for host in hosts)


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """A run by one process."""
    run = tmp_path_factory.mktemp("short")
    train(classification_recipe(**SETTINGS), run, World(torch.device("cpu")), quiet=True)
    return run


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Path:
    """A run by one process that is long enough for something to happen in it."""
    run = tmp_path_factory.mktemp("long")
    train(classification_recipe(**SETTINGS | LONG), run, World(torch.device("cpu")), quiet=True)
    return run


def check_equal(run: Path, alone: Path, steps: int) -> None:
    ours, theirs = losses(run), losses(alone)
    assert sorted(ours) == sorted(theirs) == list(range(1, steps + 1))
    for step, loss in theirs.items():
        assert ours[step] == pytest.approx(loss, rel=5e-3), step
    weights = load_file(alone / "weights.safetensors")
    for name, tensor in load_file(run / "weights.safetensors").items():
        assert torch.allclose(tensor, weights[name], atol=2e-2), name


@pytest.mark.parametrize("count", [2, 3])
def test_several_machines_train_as_one_process_does(tmp_path, short, count):
    recipe, run = write_recipe(tmp_path / "recipe.yaml"), tmp_path / "run"
    with machines(count, tmp_path) as hosts:
        words = ("train", "--config", recipe, "--output", run)
        finish([host.torchrun(str(count), *words) for host in hosts], hosts)
    check_equal(run, short, STEPS)
    assert [entry["processes"] for entry in events(run, "start")] == [count]


def test_a_killed_machine_returns_and_the_run_resumes_from_its_last_checkpoint(tmp_path, long):
    recipe, run = write_recipe(tmp_path / "recipe.yaml", **LONG), tmp_path / "run"
    words = ("train", "--config", recipe, "--output", run)
    with machines(2, tmp_path) as hosts:
        first = hosts[0].torchrun("2", *words)
        hosts[1].torchrun("2", *words)
        wait_for_step(run, 25)
        hosts[1].kill()
        reached = max(losses(run))
        again = hosts[1].torchrun("2", *words)
        finish([first, again], hosts)
    starts = [entry["step"] for entry in events(run, "start")]
    assert len(starts) == 2
    assert starts[0] == 0
    assert reached - 11 <= starts[1] <= reached + 1  # saved every ten steps
    check_equal(run, long, LONG_STEPS)


def test_a_machine_joins_another_is_removed_and_no_step_is_lost(tmp_path, long):
    """`--nnodes 1:3`: two machines, then three, then two without the one that was killed."""
    recipe, run = write_recipe(tmp_path / "recipe.yaml", **LONG), tmp_path / "run"
    words = ("train", "--config", recipe, "--output", run)
    conf = "last_call_timeout=5"  # seconds to wait for further machines; torchrun's default is 30
    with machines(3, tmp_path) as hosts:
        started = [host.torchrun("1:3", *words, conf=conf) for host in hosts[:2]]
        wait_for_processes(run, 2)
        wait_for_step(run, 5)
        # The run must not end before the third machine has arrived, so its first process is stopped until then.
        worker = hosts[0].worker()
        os.kill(worker, signal.SIGSTOP)
        stopped = max(losses(run))
        started.append(hosts[2].torchrun("1:3", *words, conf=conf))
        wait_until(lambda: is_told_to_end(worker), 60, "torchrun did not notice the third machine")
        os.kill(worker, signal.SIGCONT)
        wait_for_processes(run, 3)
        joined = events(run, "start")[-1]["step"]
        assert (
            joined >= stopped
        )  # torchrun ended the processes with SIGTERM, and they wrote a checkpoint
        wait_for_step(run, joined + 20)
        hosts[1].kill()
        reached = max(losses(run))
        finish([started[0], started[2]], hosts)
    starts = [(entry["processes"], entry["step"]) for entry in events(run, "start")]
    assert [count for count, _ in starts][-2:] == [3, 2]
    assert reached - 11 <= starts[-1][1] <= reached + 1  # saved every ten steps
    check_equal(run, long, LONG_STEPS)


def test_a_cut_of_20_seconds_is_bridged_and_a_longer_one_ends_within_the_timeout(tmp_path, long):
    recipe, run = write_recipe(tmp_path / "recipe.yaml", **LONG), tmp_path / "run"
    words = ("train", "--config", recipe, "--output", run, "--dist-timeout", DIST_TIMEOUT)
    with machines(2, tmp_path) as hosts:
        started = [host.torchrun("2", *words, restarts=0) for host in hosts]
        wait_for_step(run, 15)
        hosts[1].cut()
        time.sleep(20)
        cut = max(losses(run))
        hosts[1].join()
        # TCP repeats its packets at growing intervals, the last of which is at most as long as the cut.
        wait_for_step(run, cut + 15, 20 + 20)
        assert [entry["step"] for entry in events(run, "start")] == [0]

        workers = [host.worker() for host in hosts]
        hosts[1].cut()
        message = "the processes did not end"
        wait_until(lambda: all(map(has_ended, workers)), DIST_TIMEOUT + TO_END, message)
        reached = max(losses(run))
        assert reached < LONG_STEPS
        # torchrun on the machine without the rendezvous waits for an answer as long as TCP does, a quarter of an hour.
        hosts[1].join()
        assert [process.wait(TO_END) != 0 for process in started] == [True, True]
        finish([host.torchrun("2", *words) for host in hosts], hosts)
    starts = [entry["step"] for entry in events(run, "start")]
    assert len(starts) == 2
    assert reached - 11 <= starts[1] <= reached + 1
    check_equal(run, long, LONG_STEPS)
