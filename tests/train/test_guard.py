"""Checking steps one step later (as on CUDA, forced on the CPU here) gives the results of immediate checks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.recipes import classification_recipe

from pale.errors import DataError, NonFiniteError
from pale.recipes.files import recipe_to_yaml
from pale.train.distributed import World
from pale.train.guard import Guard, MovingAverage
from pale.train.loop import Trainer, build_trainer, train

from .test_loop import assert_same, events, poison, weights

ALONE = World(torch.device("cpu"))
RARELY = {"log_every": 100}  # writing a line of the log looks at all steps


def later(run, resume=False, **changes):
    return train(
        classification_recipe(**RARELY | changes), run, ALONE, resume, quiet=True, delayed=True
    )


@given(st.lists(st.sampled_from(["good", "loss", "norm"]), max_size=20), st.integers(1, 4))
def test_every_bad_step_is_recorded_and_too_many_in_a_row_halt_the_rest(kinds, limit):
    guard = Guard(ALONE, limit)
    row, halted, records = 0, False, []
    for step, kind in enumerate(kinds):
        loss = torch.tensor(math.nan if kind == "loss" else 1.5)
        norm = torch.tensor(math.inf if kind == "norm" else 2.5)
        skip = guard.check(step, 0.1, torch.tensor([[0, step]]), loss, norm)
        row = row + 1 if kind != "good" else 0
        halted = halted or row >= limit
        assert skip.item() == (kind != "good" or halted)
        records += guard.completed(1)
        assert len(records) == step  # all but the last
    records += guard.completed(0)
    assert [(s.step, s.bad, s.bad_here) for s in records] == [
        (step, kind != "good", kind != "good") for step, kind in enumerate(kinds)
    ]
    assert all(s.loss == 1.5 for s, kind in zip(records, kinds, strict=True) if kind != "loss")


def test_delayed_checks_change_only_rounding(tmp_path):
    train(classification_recipe(), tmp_path / "at_once", ALONE, quiet=True)
    later(tmp_path / "later")
    assert_same(weights(tmp_path / "at_once"), weights(tmp_path / "later"), atol=1e-5)
    (first, last) = events(tmp_path / "later", "step")
    expected = {e["step"]: e for e in events(tmp_path / "at_once", "step")}
    for entry in (first, last):
        assert entry["loss"] == pytest.approx(expected[entry["step"]]["loss"], rel=1e-4)
        assert entry["grad_norm"] == pytest.approx(expected[entry["step"]]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("bad", [0, 4, 8], ids=["first", "middle", "last"])
def test_a_bad_loss_stops_with_the_state_before_it(tmp_path, monkeypatch, bad):
    later(tmp_path / "good")
    poison(monkeypatch, {bad})
    with pytest.raises(NonFiniteError) as error:
        later(tmp_path / "bad")
    message = str(error.value)
    for words in (f"step {bad}: loss nan", "at learning rate ", "scene ", "--on_nonfinite skip"):
        assert words in message
    checkpoints = [path.name for path in (tmp_path / "bad/checkpoints").iterdir()]
    assert f"step_{bad:08d}" in checkpoints
    assert max(checkpoints) == f"step_{bad:08d}"
    # The learning rate and the samples are those of the bad step, not of the one after it.
    with pytest.raises(NonFiniteError) as at_once:
        train(classification_recipe(), tmp_path / "at_once", ALONE, quiet=True)
    assert str(at_once.value).partition(";")[0] == message.partition(";")[0]
    monkeypatch.undo()
    later(tmp_path / "bad", resume=True)
    assert_same(weights(tmp_path / "good"), weights(tmp_path / "bad"))


def test_a_nan_gradient_is_detected_too(tmp_path):
    trainer = build_trainer(classification_recipe(**RARELY), tmp_path, ALONE, delayed=True)

    def spoil(grad):
        return grad * math.inf if trainer.state.step == 3 else grad

    trainer.state.model.head.fc.bias.register_hook(spoil)
    tmp_path.joinpath("checkpoints").mkdir()
    with pytest.raises(NonFiniteError, match=r"step 3: loss [\d.]+, gradient norm (inf|nan)"):
        trainer.fit(quiet=True)
    assert trainer.state.step == 3
    assert all(value.isfinite().all() for value in trainer.state.model.state_dict().values())


def test_delayed_skipping_equals_immediate_skipping(tmp_path, monkeypatch):
    poison(monkeypatch, {2, 4, 5})
    assert later(tmp_path / "later", on_nonfinite="skip").step == 9
    train(classification_recipe(on_nonfinite="skip"), tmp_path / "at_once", ALONE, quiet=True)
    records = [events(tmp_path / name, "skipped") for name in ("later", "at_once")]
    assert records[0] == records[1]
    assert [entry["step"] for entry in records[0]] == [2, 4, 5]
    # The averages too: a skipped step is no step for them.
    assert_same(weights(tmp_path / "later"), weights(tmp_path / "at_once"), atol=1e-5)


def test_too_many_skipped_steps_stop_the_run(tmp_path, monkeypatch):
    before = build_trainer(
        classification_recipe(epochs=9), tmp_path / "new", ALONE
    ).state.model.state_dict()
    poison(monkeypatch, set(range(10)))  # the eleventh is good, but comes too late
    with pytest.raises(NonFiniteError, match="step 9"):
        later(tmp_path / "run", on_nonfinite="skip", epochs=9, eval_every=9, ema=None)
    trainer = build_trainer(classification_recipe(epochs=9, ema=None), tmp_path / "run", ALONE)
    trainer.resume(lambda text: None)
    assert trainer.state.step == 9
    assert_same(trainer.state.model.state_dict(), before)


def test_steps_under_way_are_checked_before_a_signal_or_an_unreadable_image_stops_the_run(
    tmp_path, monkeypatch
):
    poison(monkeypatch, {4})
    make_step = Trainer.make_step

    def fails(self, iterator):
        if self.state.step == 5:
            raise DataError("a.png: cannot be read")
        return make_step(self, iterator)

    monkeypatch.setattr(Trainer, "make_step", fails)
    with pytest.raises(NonFiniteError, match="step 4: loss nan"):
        later(tmp_path / "run")
    assert {p.name for p in (tmp_path / "run/checkpoints").iterdir()} == {"step_00000004"}


@pytest.mark.parametrize("delayed", [False, True])
def test_statistics_of_batch_norm_are_restored_after_a_bad_step(tmp_path, delayed):
    model = {"name": "resnet18", "pale_size": None, "options": {}}
    recipe = classification_recipe(**RARELY | {"model": model, "on_nonfinite": "skip"})
    trainer = build_trainer(recipe, tmp_path, ALONE, delayed=delayed)
    prepare, before = trainer.task.prepare, {}

    def spoil(batch, step):
        batch = prepare(batch, step)
        if step == 3:
            before.update({n: b.clone() for n, b in trainer.state.model.named_buffers()})
            batch["images"] = batch["images"] * math.nan
        elif step == 4:
            assert_same(dict(trainer.state.model.named_buffers()), before)
        return batch

    trainer.task.prepare = spoil
    tmp_path.joinpath("recipe.yaml").write_text(recipe_to_yaml(recipe))
    trainer.fit(quiet=True)
    assert before
    assert all(b.isfinite().all() for b in trainer.state.model.buffers())
    assert all(b.isfinite().all() for b in trainer.state.ema.module.buffers())


def test_fp16_is_checked_immediately(tmp_path):
    assert (
        build_trainer(
            classification_recipe(precision="fp16"), tmp_path, ALONE, delayed=True
        ).stepper.guard
        is None
    )
    assert build_trainer(classification_recipe(), tmp_path, ALONE).stepper.guard is None


def test_the_moving_average_equals_timm_or_is_unchanged():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    ours, timms = MovingAverage(model, 0.9), MovingAverage(model, 0.9)
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        ours.update_unless(torch.tensor(0.0), model)
        timms.update(model)
        assert_same(ours.module.state_dict(), timms.module.state_dict(), atol=1e-6)
    before = {name: value.clone() for name, value in ours.module.state_dict().items()}
    torch.optim.SGD(model.parameters(), 0.1).step()
    ours.update_unless(torch.tensor(1.0), model)
    assert_same(ours.module.state_dict(), before)
