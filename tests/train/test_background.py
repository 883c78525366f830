"""Files written while training continues: slow disks, full disks, and file systems that are gone for a while."""

import os
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from support.processes import full_disk
from support.recipes import classification_recipe

from pale.recipes.files import recipe_to_yaml
from pale.train import background, checkpoint
from pale.train.background import BackgroundWriter, copy_to_cpu
from pale.train.distributed import World
from pale.train.log import read
from pale.train.loop import build_trainer, train

ALONE = World(torch.device("cpu"))
SAVING = {"saving__every_steps": 1, "log_every": 1}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(background, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(background, "LONGEST_PAUSE", 0.02)


class Failing:
    """A job that fails until it is mended."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or OSError("no space left")
        self.attempts = 0
        self.mended = threading.Event()

    def __call__(self) -> None:
        self.attempts += 1
        if not self.mended.is_set():
            raise self.error


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class TestWriter:
    def test_jobs_run_in_order_in_another_thread_and_are_finished_in_this_one(self):
        writer, ran, done = BackgroundWriter(0), [], []
        for i in range(5):
            writer.submit(
                f"file {i}",
                lambda i=i: ran.append((i, threading.current_thread().name)),
                lambda i=i: done.append((i, threading.current_thread())),
            )
        assert writer.wait() == []
        assert ran == [(i, "pale-writer") for i in range(5)]
        assert done == [(i, threading.current_thread()) for i in range(5)]

    def test_a_job_that_fails_is_repeated_and_reported(self):
        writer, job, done = BackgroundWriter(60), Failing(), []
        writer.submit("the checkpoint", job, lambda: done.append(1))
        until(lambda: job.attempts >= 3)
        messages = writer.check()
        assert "the checkpoint could not be written (no space left)" in messages[0]
        assert done == []
        job.mended.set()
        writer.wait()
        assert done == [1]

    def test_the_error_is_raised_when_patience_has_ended(self):
        writer = BackgroundWriter(0.1)
        writer.submit("a", Failing())
        with pytest.raises(OSError, match="no space left"):
            writer.wait()
        with pytest.raises(OSError, match="no space left"):
            writer.check()
        writer.submit("a", Failing())  # blocks no one
        writer.drain()

    def test_an_error_in_the_program_is_raised_immediately(self):
        writer = BackgroundWriter(60)
        writer.submit("a", Failing(KeyError("a bug")))
        with pytest.raises(KeyError, match="a bug"):
            writer.wait()

    def test_a_newer_job_replaces_one_that_fails_and_jobs_of_other_names_stay(self):
        writer, old, other, new = BackgroundWriter(60), Failing(), Failing(), Failing()
        writer.submit("best", other)
        writer.submit("checkpoint", old)
        until(lambda: other.attempts >= 2)
        writer.submit("checkpoint", new)
        for job in (old, other, new):
            job.mended.set()
        writer.wait()
        assert (old.attempts, new.attempts) == (0, 1)

    def test_a_newer_job_waits_for_one_that_is_being_written(self):
        writer, order, slow = BackgroundWriter(60), [], threading.Event()
        writer.submit("checkpoint", lambda: (slow.wait(20), order.append("old")))
        threading.Timer(0.2, slow.set).start()
        writer.submit("checkpoint", lambda: order.append("new"))
        assert order[:1] == ["old"]
        writer.wait()
        assert order == ["old", "new"]


def test_a_copy_shares_no_memory_and_keeps_types():
    state = {"a": torch.ones(2), "b": [torch.zeros(1), (3, "x")], "c": {1: torch.ones(1)}}
    copied = copy_to_cpu(state)
    state["a"].zero_()
    state["c"][1].zero_()
    assert copied["a"].tolist() == [1, 1]
    assert copied["b"][1] == (3, "x")
    assert copied["c"][1].tolist() == [1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run that waits for each checkpoint."""
    run = tmp_path_factory.mktemp("plain") / "run"
    train(classification_recipe(**SAVING, saving__background=False), run, ALONE, quiet=True)
    return run


def check_equal(run, plain) -> None:
    """Check that the last checkpoint is the same bit for bit, and that the log has every step once."""
    paths = [checkpoint.newest(each / "checkpoints") for each in (run, plain)]
    assert paths[0].name == paths[1].name == "step_00000009"
    for name in ("model.safetensors", "ema.safetensors"):
        if not (paths[1] / name).exists():
            continue
        one, two = (load_file(path / name) for path in paths)
        assert all(torch.equal(one[key], two[key]) for key in two)
    one, two = (checkpoint.load_trainer(path, torch.device("cpu")) for path in paths)
    for number, values in two["optimizer"]["state"].items():
        for key, value in values.items():
            assert torch.equal(one["optimizer"]["state"][number][key], value)
    steps = [e["step"] for e in read(run / "log.jsonl") if e["event"] == "step"]
    assert steps == list(range(1, 10))
    best = [load_file(each / "best.safetensors") for each in (run, plain)]
    assert all(torch.equal(best[0][key], best[1][key]) for key in best[1])


def run_with(recipe, run, before_step) -> None:
    """Train, and call a function with the number of each step before it."""
    trainer = build_trainer(recipe, run, ALONE)
    run.mkdir()
    (run / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    make_step = trainer.make_step

    def step(iterator):
        before_step(trainer.state.step)
        return make_step(iterator)

    trainer.make_step = step
    trainer.fit(quiet=True)


def test_training_continues_while_a_slow_disk_is_written(tmp_path, plain, monkeypatch):
    sync = os.fsync

    def slow(descriptor):
        time.sleep(0.2)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    train(
        classification_recipe(**SAVING | {"saving__every_steps": 4}),
        tmp_path / "run",
        ALONE,
        quiet=True,
    )
    monkeypatch.undo()
    entries = [(e["event"], e["step"]) for e in read(tmp_path / "run/log.jsonl")]
    assert entries.index(("saved", 4)) > entries.index(("step", 5))
    check_equal(tmp_path / "run", plain)


def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path, plain):
    limits = []

    def fill(step: int) -> None:
        if step == 3:
            limits.append(full_disk(200))
            limits[0].__enter__()
            time.sleep(0.1)  # so that an attempt falls into this time
        if step == 6:
            limits[0].__exit__(None, None, None)

    run_with(classification_recipe(**SAVING), tmp_path / "run", fill)
    failed = [e for e in read(tmp_path / "run/log.jsonl") if e["event"] == "write_failed"]
    assert failed
    assert "could not be written" in failed[0]["message"]
    assert "training continues" in failed[0]["message"]
    check_equal(tmp_path / "run", plain)


def test_a_file_system_that_is_gone_for_a_while_costs_nothing(tmp_path, plain):
    run, away = tmp_path / "run", tmp_path / "away"

    def unmount(step: int) -> None:
        if step == 3:
            run.rename(away)
            time.sleep(0.1)
        if step == 6:
            assert not run.exists()  # nothing was written beside it
            away.rename(run)

    run_with(classification_recipe(**SAVING), run, unmount)
    assert [e for e in read(run / "log.jsonl") if e["event"] == "write_failed"]
    check_equal(run, plain)


def test_a_disk_that_stays_full_ends_the_run_and_keeps_the_last_checkpoint(tmp_path):
    recipe = classification_recipe(**SAVING, saving__patience_minutes=0.001)
    limits = []

    def fill(step: int) -> None:
        if step == 3:
            limits.append(full_disk(200))
            limits[0].__enter__()

    try:
        with pytest.raises(OSError, match="pale train --resume"):
            run_with(recipe, tmp_path / "run", fill)
    finally:
        limits[0].__exit__(None, None, None)
    kept = checkpoint.newest(tmp_path / "run/checkpoints")
    assert kept.name in ("step_00000002", "step_00000003")
    train(recipe, tmp_path / "run", ALONE, resume=True, quiet=True)
    assert checkpoint.newest(tmp_path / "run/checkpoints").name == "step_00000009"
