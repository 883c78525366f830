import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from support.datasets import write_image_folders
from support.recipes import CLASSIFICATION, classification_recipe, token_label_recipe

from pale.cli.main import main
from pale.data.loader import iterate_batches, make_loader
from pale.errors import DataError, NonFiniteError
from pale.recipes.files import recipe_to_yaml
from pale.train import loop
from pale.train.distributed import World
from pale.train.log import read
from pale.train.loop import Trainer, build_trainer, train

ALONE = World(torch.device("cpu"))


def weights(run):
    return load_file(run / "weights.safetensors")


def assert_same(one, two, **tolerance):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert (
            torch.allclose(tensor, two[name], **tolerance)
            if tolerance
            else torch.equal(tensor, two[name])
        ), name


def events(run, kind):
    return [entry for entry in read(run / "log.jsonl") if entry["event"] == kind]


def lose_the_last(run):
    """Damage the last checkpoint of six steps; the one before it is of step 4."""
    names = [path.name for path in sorted((run / "checkpoints").glob("step_*"))]
    assert names[-2:] == ["step_00000004", "step_00000006"]
    (run / "checkpoints/step_00000006/trainer.pt").unlink()


def test_a_run_leaves_log_recipe_weights_and_checkpoint(tmp_path):
    outcome = train(classification_recipe(), tmp_path, ALONE, quiet=True)
    assert outcome.step == outcome.steps == 9
    assert outcome.signal is None
    assert {path.name for path in tmp_path.iterdir()} == {
        "best.safetensors",
        "checkpoints",
        "evaluation.json",
        "log.jsonl",
        "recipe.yaml",
        "report.html",
        "weights.safetensors",
    }
    assert [entry["step"] for entry in events(tmp_path, "step")] == list(range(1, 10))
    assert [entry["epoch"] for entry in events(tmp_path, "eval")] == [1, 2, 3]
    assert all(100 < entry["memory_mb"] < 100_000 for entry in events(tmp_path, "step"))
    (start,) = events(tmp_path, "start")
    assert start["torch"] == torch.__version__
    assert outcome.figures["images"] == 12


def test_the_same_run_twice_is_the_same_to_the_bit(tmp_path):
    for name in ("a", "b"):
        torch.manual_seed(hash(name) % 1000)
        train(classification_recipe(), tmp_path / name, ALONE, quiet=True)
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    train(classification_recipe(seed=1), tmp_path / "c", ALONE, quiet=True)
    with pytest.raises(AssertionError):
        assert_same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_saves_the_run_which_resumes_bit_equal(tmp_path, monkeypatch, capsys, which):
    before = signal.getsignal(which)
    train(classification_recipe(), tmp_path / "whole", ALONE, quiet=True)
    make_step = Trainer.make_step

    def interrupted(self, iterator):
        if self.state.step == 4:
            os.kill(os.getpid(), which)
        return make_step(self, iterator)

    run = tmp_path / "cut"
    monkeypatch.setattr(Trainer, "make_step", interrupted)
    outcome = train(classification_recipe(), run, ALONE)
    monkeypatch.undo()
    assert (outcome.step, outcome.signal) == (5, which)
    output = capsys.readouterr().out.replace("\n", "")
    assert f"stopped by {which.name} after step 5 of 9" in output
    assert f"resume with: pale train --resume {run}" in output
    assert train(classification_recipe(), run, ALONE, resume=True, quiet=True).step == 9
    assert_same(weights(tmp_path / "whole"), weights(run))
    curve = [(e["step"], e["loss"]) for e in events(run, "step")]
    assert curve == [(e["step"], e["loss"]) for e in events(tmp_path / "whole", "step")]
    assert signal.getsignal(which) == before


def test_accumulation_changes_only_rounding(tmp_path):
    train(classification_recipe(), tmp_path / "one", ALONE, quiet=True)
    train(classification_recipe(accumulate=2), tmp_path / "two", ALONE, quiet=True)
    one, two = (events(tmp_path / run, "step") for run in ("one", "two"))
    assert len(one) == len(two) > 0
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


def test_workers_change_nothing(tmp_path):
    train(classification_recipe(), tmp_path / "none", ALONE, quiet=True)
    train(classification_recipe(data__workers=2), tmp_path / "two", ALONE, quiet=True)
    assert_same(weights(tmp_path / "none"), weights(tmp_path / "two"))


def test_moving_average_is_that_of_the_weights(tmp_path):
    trainer = build_trainer(classification_recipe(), tmp_path, ALONE)
    expected = {name: p.detach().clone() for name, p in trainer.state.model.named_parameters()}
    loader = torch.utils.data.DataLoader(
        trainer.data, batch_sampler=trainer.sampler, collate_fn=trainer.task.collate
    )
    iterator = iter(loader)
    for _ in range(3):
        trainer.make_step(iterator)
        for name, p in trainer.state.model.named_parameters():
            expected[name] = 0.9 * expected[name] + 0.1 * p.detach()
    for name, p in trainer.state.ema.module.named_parameters():
        assert torch.allclose(p, expected[name], atol=1e-6), name


def test_clipping_bounds_the_step_and_reports_the_norm_before(tmp_path):
    trainer = build_trainer(classification_recipe(optim__clip=1e-3), tmp_path, ALONE)
    norms = []
    trainer.state.optimizer.register_step_pre_hook(
        lambda opt, *_: norms.append(
            torch.nn.utils.get_total_norm(
                [p.grad for g in opt.param_groups for p in g["params"]]
            ).item()
        )
    )
    loader = torch.utils.data.DataLoader(
        trainer.data, batch_sampler=trainer.sampler, collate_fn=trainer.task.collate
    )
    done = trainer.make_step(iter(loader))
    assert done.grad_norm > 0.01
    assert norms == [pytest.approx(1e-3, rel=0.01)]


def poison(monkeypatch, steps):
    loss = loop.Trainer.make_step

    def bad(self, iterator):
        plain = self.task.loss

        def poisoned(model, batch):
            return plain(model, batch) * (float("nan") if self.state.step in steps else 1.0)

        self.task.loss = poisoned
        try:
            return loss(self, iterator)
        finally:
            self.task.loss = plain

    monkeypatch.setattr(loop.Trainer, "make_step", bad)


def test_a_nan_loss_stops_the_run_before_the_update(tmp_path, monkeypatch):
    poison(monkeypatch, {4})
    with pytest.raises(NonFiniteError) as error:
        train(classification_recipe(), tmp_path / "bad", ALONE, quiet=True)
    message = str(error.value)
    for words in ("step 4: loss nan", "at learning rate 0.0", "scene ", "--on_nonfinite skip"):
        assert words in message
    monkeypatch.undo()
    # The state before it was kept: going on without the poison is the run without it.
    train(classification_recipe(), tmp_path / "good", ALONE, quiet=True)
    train(classification_recipe(), tmp_path / "bad", ALONE, resume=True, quiet=True)
    assert_same(weights(tmp_path / "good"), weights(tmp_path / "bad"))


def test_nan_steps_can_be_skipped_up_to_a_limit(tmp_path, monkeypatch):
    poison(monkeypatch, {2, 4})
    outcome = train(classification_recipe(on_nonfinite="skip"), tmp_path / "a", ALONE, quiet=True)
    assert outcome.step == 9
    assert [entry["step"] for entry in events(tmp_path / "a", "skipped")] == [2, 4]
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "a").values())
    monkeypatch.undo()
    poison(monkeypatch, set(range(100)))
    with pytest.raises(NonFiniteError, match="step 9"):
        train(
            classification_recipe(on_nonfinite="skip", epochs=9), tmp_path / "b", ALONE, quiet=True
        )


def test_skipped_steps_are_on_the_screen_in_the_log_and_in_the_report(
    tmp_path, monkeypatch, capsys
):
    poison(monkeypatch, {1, 2, 4, 6})
    train(classification_recipe(on_nonfinite="skip"), tmp_path, ALONE)
    output = " ".join(capsys.readouterr().out.split())
    assert "skipped step 1: loss nan" in output
    assert "skipped step 4" in output
    assert "skipped step 6" not in output  # the first three in full
    assert "4 steps were skipped" in output
    skipped = re.search(
        r"<td>steps skipped .*?<td class=n>(\d+)", (tmp_path / "report.html").read_text()
    )
    assert skipped is not None
    assert skipped[1] == "4"
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    for line in lines:
        json.loads(line, parse_constant=pytest.fail)  # NaN is no JSON
    losses = {e["step"]: e["loss"] for e in map(json.loads, lines) if e["event"] == "step"}
    assert [step for step, loss in losses.items() if loss is None] == [2, 3, 5, 7]


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("first", [0, 7])
def test_a_run_that_ends_in_skipped_steps_has_failed(tmp_path, monkeypatch, first, delayed):
    poison(monkeypatch, set(range(first, 9)))
    recipe = classification_recipe(on_nonfinite="skip", log_every=100, eval_every=3)
    with pytest.raises(
        NonFiniteError, match=rf"skipped steps, {first} to 8, .*before them are saved"
    ):
        train(recipe, tmp_path / "bad", ALONE, quiet=True, delayed=delayed)
    assert not (tmp_path / "bad" / "weights.safetensors").exists()
    monkeypatch.undo()
    train(recipe, tmp_path / "bad", ALONE, resume=True, quiet=True, delayed=delayed)
    train(recipe, tmp_path / "good", ALONE, quiet=True, delayed=delayed)
    assert_same(weights(tmp_path / "good"), weights(tmp_path / "bad"))
    assert events(tmp_path / "bad", "skipped") == []


def test_a_run_with_nan_weights_has_failed(tmp_path, monkeypatch):
    make_step = Trainer.make_step

    def spoils(self, iterator):
        done = make_step(self, iterator)
        if self.state.step == 9:
            self.state.model.head.fc.bias.data[0] = float("inf")
        return done

    monkeypatch.setattr(Trainer, "make_step", spoils)
    with pytest.raises(NonFiniteError, match="last step made weights that are NaN or Inf"):
        train(classification_recipe(eval_every=3), tmp_path, ALONE, quiet=True)
    assert not (tmp_path / "weights.safetensors").exists()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_and_resumes(tmp_path, precision):
    recipe = classification_recipe(precision=precision, epochs=2)
    train(recipe, tmp_path / "whole", ALONE, quiet=True)
    losses = [entry["loss"] for entry in events(tmp_path / "whole", "step")]
    assert all(1 < loss < 4 for loss in losses)
    train(
        classification_recipe(precision=precision, epochs=2, saving__every_steps=2),
        tmp_path / "b",
        ALONE,
        quiet=True,
    )
    lose_the_last(tmp_path / "b")
    train(recipe, tmp_path / "b", ALONE, resume=True, quiet=True)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "b"))


@pytest.mark.parametrize("harm", ["cut short", "a loop"])
def test_an_unreadable_image_stops_the_run_but_loses_no_step(tmp_path, harm):
    write_image_folders(tmp_path / "data")
    recipe = classification_recipe(data__kind="folder", data__root=str(tmp_path / "data"), batch=2)
    good = tmp_path / "data" / "train" / "a" / "2.png"
    content = good.read_bytes()
    good.unlink()
    if harm == "a loop":  # the system, not Pillow, refuses it, as it does a file without rights
        good.symlink_to(good.name)
    else:
        good.write_bytes(content[:40])
    run = tmp_path / "run"
    with pytest.raises(ValueError, match=r"^/.*a/2\.png: cannot be read.* is saved; resume"):
        train(recipe, run, ALONE, quiet=True)
    good.unlink()
    good.write_bytes(content)
    assert train(recipe, run, ALONE, resume=True, quiet=True).step == 12


FAIL_THEN_TRAIN = """
import sys
from pathlib import Path
import torch
from pale.recipes.files import read_recipe
from pale.train.distributed import World
from pale.train.loop import train

folder = Path(sys.argv[1])
recipe, world = read_recipe(folder / "recipe.yaml"), World(torch.device("cpu"))
bad = folder / "data/train/a/2.png"
content = bad.read_bytes()
bad.write_bytes(content[:40])
try:
    train(recipe, folder / "run", world, quiet=True)
except ValueError as error:
    print(error)
bad.write_bytes(content)
print(train(recipe, folder / "run", world, resume=True, quiet=True).step)
"""


@pytest.mark.slow
def test_a_process_that_continues_after_an_unreadable_image_ends(tmp_path):
    # A worker of the first run may still be there, and passes over the SIGTERM by which Python ends it.
    write_image_folders(tmp_path / "data")
    changes = {"data__root": str(tmp_path / "data"), "data__workers": 1}
    recipe = classification_recipe(data__kind="folder", batch=2, **changes)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    command = [sys.executable, "-c", FAIL_THEN_TRAIN, str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "a/2.png: cannot be read as an image" in done.stdout
    assert done.stdout.endswith("\n12\n")


@pytest.mark.parametrize("change", [{"batch": 4}, {"seed": 3}], ids=["batch", "seed"])
def test_batch_and_seed_cannot_change_when_a_run_resumes(tmp_path, change):
    train(classification_recipe(epochs=1), tmp_path, ALONE, quiet=True)
    (name, value) = next(iter(change.items()))
    before = {"batch": 8, "seed": 0}[name]
    with pytest.raises(
        ValueError, match=rf"{name} decides.* got {value}, .* has {before}; .*--model"
    ) as error:
        train(classification_recipe(**change), tmp_path, ALONE, resume=True, quiet=True)
    # The way out that it shows is one.
    words = str(error.value).partition(": pale train ")[2].replace("DIR", str(tmp_path / "new"))
    assert main(["train", *words.split(), "--epochs", "1", "--json"]) == 0


def test_a_checkpoint_with_more_steps_than_the_run_is_an_error(tmp_path):
    train(classification_recipe(epochs=2), tmp_path, ALONE, quiet=True)
    with pytest.raises(ValueError, match="has done 6 steps, the recipe has 3; give more epochs"):
        train(classification_recipe(epochs=1), tmp_path, ALONE, resume=True, quiet=True)


@pytest.mark.parametrize(
    "change",
    [{"optim__weight_decay": 0.9}, {"optim__betas": [0.5, 0.9]}, {"optim__eps": 1e-3}],
    ids=lambda change: next(iter(change)),
)
def test_changed_settings_of_the_optimizer_take_effect_when_a_run_resumes(tmp_path, change):
    train(classification_recipe(epochs=2), tmp_path / "a", ALONE, quiet=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    train(classification_recipe(), tmp_path / "a", ALONE, resume=True, quiet=True)
    trainer = build_trainer(classification_recipe(**change), tmp_path / "b", ALONE)
    trainer.resume(pytest.fail)
    name = next(iter(change)).removeprefix("optim__")
    wanted = getattr(trainer.recipe.optim, name)
    spared, others = (group[name] for group in trainer.state.optimizer.param_groups)
    assert others == wanted
    assert spared == (0 if name == "weight_decay" else wanted)
    assert (
        trainer.state.optimizer.state_dict()["state"][0]["step"] == 6
    )  # the moments are the run's
    train(trainer.recipe, tmp_path / "b", ALONE, resume=True, quiet=True)
    one, two = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert any(not torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim__layer_decay": 0.7}, "parameter groups differ.*optim.layer_decay cannot be"),
        ({"optim__name": "muon"}, "parameter groups differ.*optim.name cannot change"),
        (
            {"model__options": {"depths": [2, 1, 1, 1]}},
            r"it has \d+ parameters, the model has \d+.*resume with the recipe of the run",
        ),
        (
            {"model__options": CLASSIFICATION["model.options"] | {"channels": [8, 16, 16, 32]}},
            r"head.fc.weight has shape \(8, 16\) there, \(8, 32\) here.*the model cannot change",
        ),
    ],
    ids=["layer decay", "optimizer", "depth", "width"],
)
def test_settings_that_cannot_change_when_a_run_resumes_are_reported(tmp_path, change, message):
    train(classification_recipe(epochs=1, ema=None), tmp_path, ALONE, quiet=True)
    with pytest.raises(ValueError, match=message):
        train(classification_recipe(ema=None, **change), tmp_path, ALONE, resume=True, quiet=True)


@pytest.mark.parametrize("names", [("adamw", "muon"), ("muon", "adamw")])
def test_the_optimizer_cannot_change_where_its_groups_are_the_same(tmp_path, names):
    """All parameters of a ResNet with weight decay are matrices."""
    plain = {"model__name": "resnet10t", "model__options": {}, "model__drop_path": 0.0, "ema": None}
    train(
        classification_recipe(epochs=1, optim__name=names[0], **plain), tmp_path, ALONE, quiet=True
    )
    with pytest.raises(ValueError, match=r"optim\.name cannot change"):
        train(
            classification_recipe(optim__name=names[1], **plain),
            tmp_path,
            ALONE,
            resume=True,
            quiet=True,
        )


def test_a_run_with_muon_resumes_bit_equal(tmp_path):
    recipe = classification_recipe(optim__name="muon")
    train(recipe, tmp_path / "a", ALONE, quiet=True)
    trainer = build_trainer(recipe, tmp_path / "b", ALONE)
    trainer.run.mkdir()
    loader = make_loader(trainer.data, trainer.sampler, trainer.task.collate, 0, False)
    iterator = iterate_batches(loader)
    for _ in range(4):
        trainer.make_step(iterator)
    trainer.save()
    train(recipe, tmp_path / "b", ALONE, resume=True, quiet=True)
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_a_batch_that_processes_cannot_split_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="batch of 9 cannot be cut into 2 equal parts"):
        train(classification_recipe(batch=9, accumulate=2), tmp_path, ALONE, quiet=True)


def test_checkpointed_blocks_drop_the_same_paths(tmp_path):
    train(classification_recipe(), tmp_path / "plain", ALONE, quiet=True)
    train(classification_recipe(model__checkpointing=True), tmp_path / "again", ALONE, quiet=True)
    assert_same(weights(tmp_path / "plain"), weights(tmp_path / "again"), atol=1e-6)


def test_tensorboard_gets_every_figure_on_request(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(classification_recipe(tensorboard=True), tmp_path, ALONE, quiet=True)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(scalar.step, scalar.value) for scalar in board.Scalars("step/loss")]
    assert losses == [(e["step"], pytest.approx(e["loss"])) for e in events(tmp_path, "step")]
    assert [scalar.step for scalar in board.Scalars("eval/top1")] == [3, 6, 9]


@pytest.mark.slow
def test_a_compiled_model_makes_the_same_run(tmp_path, monkeypatch):
    # Traced in full, but not handed to a C++ compiler: masks of drop path must be inputs, not constants.
    compile_ = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_)
    train(classification_recipe(epochs=2), tmp_path / "eager", ALONE, quiet=True)
    train(classification_recipe(epochs=2, compile=True), tmp_path / "compiled", ALONE, quiet=True)
    curves = [[e["loss"] for e in events(tmp_path / n, "step")] for n in ("eager", "compiled")]
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


def test_a_timm_model_trains_with_its_own_drop_path(tmp_path):
    options = {"depths": [1, 1], "embed_dim": 16, "num_heads": [2, 2], "window_size": 4}
    recipe = classification_recipe(
        model__name="swin_tiny_patch4_window7_224",
        model__options={**options, "img_size": 32},
        epochs=1,
        accumulate=2,
    )
    trainer = build_trainer(recipe, tmp_path, ALONE)
    assert len(trainer.stepper.network.drop_paths.masks) == 2
    assert train(recipe, tmp_path, ALONE, quiet=True).step == 3


def test_an_image_of_the_last_evaluation_can_be_repaired(tmp_path, monkeypatch):
    train(classification_recipe(), tmp_path / "good", ALONE, quiet=True)
    run, plain = tmp_path / "run", loop.Evaluation.run

    def fails_at_the_end(self, model, dtype):
        if (run / "weights.safetensors").exists() and len(events(run, "eval")) == 2:
            raise DataError("val/a.png: cannot be read")
        return plain(self, model, dtype)

    monkeypatch.setattr(loop.Evaluation, "run", fails_at_the_end)
    with pytest.raises(ValueError, match=r"a\.png: cannot be read; step 9 is saved"):
        train(classification_recipe(), run, ALONE, quiet=True)
    monkeypatch.undo()
    train(classification_recipe(), run, ALONE, resume=True, quiet=True)
    assert_same(weights(run), weights(tmp_path / "good"))
    assert [e["step"] for e in events(run, "eval")] == [3, 6, 9]


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_to_the_whole_group_reaches_the_workers_too_and_loses_nothing(tmp_path, which):
    # Ctrl-C on a terminal, timeout and cluster managers all signal every process of the group.
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        recipe_to_yaml(classification_recipe(epochs=100_000, eval_every=100_000, data__workers=2))
    )
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "pale", "train", "--config", recipe, "--output", run],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while process.poll() is None and not (run.exists() and len(events(run, "step")) > 3):
        time.sleep(0.05)
    os.killpg(process.pid, which)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + which, err
    output = " ".join(out.split())
    assert f"stopped by {which.name} after step " in output
    assert "the state is saved" in output
    done = int(output.partition("after step ")[2].split()[0])
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step_{done:08d}"]
    assert err == ""


@pytest.mark.parametrize("work", ["decoding", "pictures"])  # kept name
@pytest.mark.parametrize(
    "make", [classification_recipe, token_label_recipe], ids=["mixed", "token labels"]
)
def test_images_augmented_on_the_device_train_as_those_of_workers(tmp_path, make, work):
    def recipe(on_device):
        # Without erasing, whose noise is another there.
        changes = {"data__on_device": on_device, "augment": {"erase": 0.0}, "optim__lr": 1e-3}
        where = () if make is classification_recipe else (tmp_path / f"labels_{on_device}",)
        return make(*where, **changes)

    for on_device in "nothing", work:
        train(recipe(on_device), tmp_path / on_device, ALONE, quiet=True)
    known, found = (
        [entry["loss"] for entry in events(tmp_path / on_device, "step")]
        for on_device in ("nothing", work)
    )
    assert found == pytest.approx(known, rel=0.02)
    assert found != known  # other pixels by a grey level: it was really another way


def test_images_augmented_on_the_device_train_in_bf16(tmp_path):
    """The estimate of memory augmented them under autocast, which is an error."""
    recipe = classification_recipe(data__on_device="pictures", augment={"auto": "rand-m9-n3"})
    train(recipe.override({"precision": "bf16"}), tmp_path / "run", ALONE, quiet=True)
    losses = [entry["loss"] for entry in events(tmp_path / "run", "step")]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("work", ["decoding", "pictures"])  # kept name
def test_images_augmented_on_the_device_resume_bit_equal(tmp_path, work):
    changes = {"data__on_device": work, "data__workers": 2, "epochs": 2}
    train(classification_recipe(**changes), tmp_path / "whole", ALONE, quiet=True)
    train(
        classification_recipe(**changes, saving__every_steps=2), tmp_path / "b", ALONE, quiet=True
    )
    lose_the_last(tmp_path / "b")
    train(classification_recipe(**changes), tmp_path / "b", ALONE, resume=True, quiet=True)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "b"))
