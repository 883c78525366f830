import pytest
import torch
from support.recipes import classification_recipe

from pale.train import loop, step_clock
from pale.train.distributed import World
from pale.train.log import read
from pale.train.loop import Trainer, train


class Clock:
    """A clock that only moves when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(step_clock, "monotonic", lambda: self.now)

    def takes(self, seconds, method):
        def timed(*args, **keywords):
            self.now += seconds
            return method(*args, **keywords)

        return timed


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.mark.parametrize("log_every", [1, 2, 4, 100])
def test_the_logged_throughput_leaves_out_evaluation_and_saving(
    log_every, clock, tmp_path, monkeypatch
):
    # Nine steps of one second and eight images; three evaluations of 100 s, four checkpoints of 50 s.
    monkeypatch.setattr(Trainer, "make_step", clock.takes(1.0, Trainer.make_step))
    monkeypatch.setattr(Trainer, "evaluate", clock.takes(100.0, Trainer.evaluate))
    monkeypatch.setattr(Trainer, "save", clock.takes(50.0, Trainer.save))
    recipe = classification_recipe(log_every=log_every, saving__every_steps=2)
    train(recipe, tmp_path, World(torch.device("cpu")), quiet=True)
    steps = [event for event in read(tmp_path / "log.jsonl") if event["event"] == "step"]
    assert [event["images_per_s"] for event in steps] == [8.0] * len(steps)
    assert steps[-1]["step"] == 9


def test_the_time_of_steps_that_the_device_has_not_finished_is_not_paused(
    clock, tmp_path, monkeypatch
):
    """A step on a GPU returns at once; the time passes when the loop waits for the device."""
    waiting = 0.0

    def make_step(trainer, iterator):
        nonlocal waiting
        waiting += 1.0
        return step(trainer, iterator)

    def settle(trainer, lag=0):
        nonlocal waiting
        if lag == 0:
            clock.now, waiting = clock.now + waiting, 0.0
        return settled(trainer, lag)

    step, settled = Trainer.make_step, Trainer.settle
    monkeypatch.setattr(Trainer, "make_step", make_step)
    monkeypatch.setattr(Trainer, "settle", settle)
    monkeypatch.setattr(Trainer, "evaluate", clock.takes(100.0, Trainer.evaluate))
    recipe = classification_recipe(log_every=2, saving__every_steps=1)
    train(recipe, tmp_path, World(torch.device("cpu")), quiet=True)
    steps = [event for event in read(tmp_path / "log.jsonl") if event["event"] == "step"]
    assert [event["images_per_s"] for event in steps] == [8.0] * len(steps)


def test_a_lap_counts_the_steps_on_both_sides_of_a_pause(clock):
    found = loop.StepClock(10)
    clock.now = 3.0
    with found.paused():
        clock.now = 1000.0
    clock.now = 1002.0
    assert found.lap(14) == (4, 5.0)
    clock.now = 1003.0
    assert found.lap(15) == (1, 1.0)
