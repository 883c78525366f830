"""Training with MixToken and token labels."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.recipes import token_label_recipe

from pale.cli.main import main
from pale.recipes import get
from pale.tools.teacher import Teacher, write_token_labels
from pale.train.distributed import World
from pale.train.log import read
from pale.train.loop import train

ALONE = World(torch.device("cpu"))


def losses(run):
    return [entry["loss"] for entry in read(run / "log.jsonl") if entry["event"] == "step"]


def test_a_run_resumes_bit_equal_from_the_middle_of_an_epoch(tmp_path):
    recipe = token_label_recipe(tmp_path / "store", saving__every_steps=4, saving__keep=9)
    train(recipe, tmp_path / "whole", ALONE, quiet=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for name in ("step_00000008", "step_00000009"):
        shutil.rmtree(tmp_path / "again" / "checkpoints" / name)
    train(recipe, tmp_path / "again", ALONE, resume=True, quiet=True)
    assert losses(tmp_path / "again")[-5:] == losses(tmp_path / "whole")[4:]
    for name in ("model", "ema"):
        one, two = (
            load_file(tmp_path / run / f"checkpoints/step_00000009/{name}.safetensors")
            for run in ("whole", "again")
        )
        assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())


def test_parts_of_a_batch_are_mixed_as_the_whole(tmp_path):
    short = {"epochs": 1, "warmup_epochs": 0}
    train(token_label_recipe(tmp_path / "store", **short), tmp_path / "one", ALONE, quiet=True)
    train(
        token_label_recipe(tmp_path / "store", accumulate=2, **short),
        tmp_path / "two",
        ALONE,
        quiet=True,
    )
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-3)


def test_evaluation_needs_no_store(tmp_path, capsys):
    train(token_label_recipe(tmp_path / "store", epochs=1), tmp_path / "run", ALONE, quiet=True)
    shutil.rmtree(tmp_path / "store")
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    assert main(["train", "--resume", str(tmp_path / "run"), "--epochs", "4"]) == 1
    assert "there are no token labels in" in capsys.readouterr().err


class Oracle(torch.nn.Module):
    """Returns the classes of the images in their order."""

    num_features = 1

    def __init__(self, classes, labels):
        super().__init__()
        self.classes, self.labels = classes, list(labels)

    def forward_features(self, images):
        labels = [self.labels.pop(0) for _ in images]
        return torch.tensor(labels).float().view(-1, 1, 1, 1).expand(-1, 1, 2, 2)

    def forward_head(self, x):
        return 9 * torch.nn.functional.one_hot(x.flatten().long(), self.classes).float()


@pytest.mark.slow
def test_a_model_learns_from_the_dense_labels(tmp_path):
    changes = {
        "data.samples": 32,
        "data.val_samples": 8,
        "data.size": 32,
        "batch": 16,
        "epochs": 16,
        "eval_every": 16,
        "warmup_epochs": 1,
        "log_every": 1,
        "optim.scale_lr": False,
        "mix.tokens": 1.0,
        "mix.probability": 0.5,
        "token_labels.store": str(tmp_path / "store"),
        "token_labels.weight": 4.0,
    }
    recipe = get("quickstart").override(changes)
    source = recipe.data.train_source(recipe.seed)
    # One image of zeros is used to find the grid.
    oracle = Oracle(len(source.classes), [0, *source.labels])
    made = write_token_labels(
        Teacher("oracle", oracle, 32, (0.5,) * 3, (0.5,) * 3), source, tmp_path / "store"
    )
    assert made.agreement == 100
    train(recipe, tmp_path / "run", ALONE, quiet=True)
    values = losses(tmp_path / "run")
    assert values[0] > 4 * 1.5  # nothing is known: ln 8 = 2.1 for each token
    assert min(values[-8:]) < 0.7 * values[0]
