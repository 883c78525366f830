"""Training commands as a user types them."""

import json
import re

import pytest
import torch
import yaml
from PIL import Image
from support.recipes import CLASSIFICATION

from pale.cli.main import main, split_overrides


def words_of(changes):
    """Settings as options; JSON is YAML."""
    return [word for name, value in changes.items() for word in (f"--{name}", json.dumps(value))]


SMALL = words_of(CLASSIFICATION)
OF_SCENES = ("data.samples", "data.val_samples")


def run(capsys, *argv):
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_recipes_are_listed_with_a_line_each(capsys):
    code, out, _ = run(capsys, "recipes", "--all")
    assert code == 0
    for text in ("imagenet.pale_t", "ablations.position_ape", "small_data.pale_t", "quickstart"):
        assert text in out
    assert (
        "Pale-T, 83.4 % in the paper." in json.loads(run(capsys, "recipes", "--json")[1]).values()
    )


def test_a_recipe_is_shown_as_the_file_that_runs_it(capsys):
    shown = yaml.safe_load(run(capsys, "recipes", "show", "imagenet.pale_b")[1])
    assert shown["model"]["drop_path"] == 0.5
    assert shown["optim"]["weight_decay"] == 0.05
    assert json.loads(run(capsys, "recipes", "show", "imagenet.pale_b", "--json")[1]) == shown


def test_train_evaluate_and_train_again_from_the_file(capsys, tmp_path):
    one = tmp_path / "one"
    code, out, err = run(capsys, "train", "quickstart", *SMALL, "--output", one, "--json")
    assert (code, err) == (0, "")
    trained = json.loads(out)
    assert (trained["step"], trained["steps"]) == (9, 9)

    code, out, _ = run(capsys, "eval", one, "--json")
    evaluated = json.loads(out)
    assert code == 0
    for figure in ("top1", "top5", "loss", "images"):
        assert evaluated[figure] == pytest.approx(trained[figure], rel=1e-6)
    code, out, _ = run(capsys, "eval", one / "best.safetensors")
    assert code == 0
    assert "12 images" in out

    two = tmp_path / "two"
    run(capsys, "train", "--config", one / "recipe.yaml", "--output", two, "--json")
    assert (two / "weights.safetensors").read_bytes() == (one / "weights.safetensors").read_bytes()

    # Done is done; more epochs go on.
    assert json.loads(run(capsys, "train", "--resume", one, "--json")[1])["step"] == 9
    longer = json.loads(run(capsys, "train", "--resume", one, "--epochs", 4, "--json")[1])
    for option in ("--init", "--model.weights"):
        code, _, err = run(capsys, "train", "--resume", one, option, one)
        assert code == 1
        assert (
            f"{option} applies to a new run only; a resumed run continues with its own weights"
            in err
        )
    assert (longer["step"], longer["steps"]) == (11, 11)


def test_own_images_from_folders_to_evaluation_and_to_other_classes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        for name, colour in (("red", (200, 0, 0)), ("green", (0, 200, 0)), ("blue", (0, 0, 200))):
            folder = tmp_path / "mine" / split / name
            folder.mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (40 + i, 50), colour).save(folder / f"{i}.jpg")
    words = words_of({name: v for name, v in CLASSIFICATION.items() if name not in OF_SCENES})
    words += ["--data.kind", "folder", "--data.root", "mine", "--batch", "4"]
    code, out, err = run(capsys, "train", "quickstart", *words)
    assert (code, err) == (0, "")
    assert "12 images, 3 classes" in out
    assert "learning rate 0.00125 = 0.01 x 4 / 32" in " ".join(out.split())
    assert (tmp_path / "runs" / "quickstart" / "weights.safetensors").is_file()
    weights = "runs/quickstart/weights.safetensors"
    code, _, err = run(capsys, "train", "quickstart", *SMALL, "--model.weights", weights)
    assert code == 1
    assert "weights for 3 classes, the data has 8; set model.new_head=true" in err
    more = ["--model.weights", weights, "--model.new_head", "true"]
    assert run(capsys, "train", "quickstart", *SMALL, *more)[0] == 0
    assert (tmp_path / "runs" / "quickstart-2" / "log.jsonl").is_file()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train"], "give either a recipe, --config FILE or --resume RUN, got 0 of them"),
        (["train", "quickstart", "--resume", "x"], "got 2 of them"),
        (["train", "quickstrat"], "did you mean 'quickstart'?"),
        (["train", "quickstart", "--optim.lrr", "1"], "did you mean 'optim.lr'?"),
        (["train", "quickstart", "--epochs"], "--epochs needs a value"),
        (["train", "imagenet.pale_t"], "data.root is not set"),
        (
            ["train", "imagenet.pale_t", "--data.root", "nowhere"],
            "there is no folder nowhere; expected are nowhere/train/<class>/<image>",
        ),
        (["train", "--resume", "nowhere"], "nowhere is not a run: it holds no recipe.yaml"),
        (["train", "finetune", "--data.root", "nowhere"], "there is no folder nowhere; give the"),
        (["train", "finetune", "--data.rot", "x"], "did you mean 'data.root'?"),
        (["train", "quickstart", "--data", "x"], "got 'x'; did you mean 'data.root'?"),
        (["eval", "nowhere"], "there are no weights at nowhere"),
        (["eval", "."], ". is neither a run nor an exported model"),
        (["recipes", "show"], "show needs the name of a recipe"),
    ],
    ids=[
        "nothing",
        "both",
        "recipe",
        "key",
        "value",
        "root",
        "folder",
        "run",
        "photos",
        "misspelt",
        "group",
        "eval",
        "no run",
        "show",
    ],
)
def test_mistakes_are_one_clear_line(capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *argv)
    assert (code, out) == (1, "")
    assert err.startswith("pale: ")
    assert err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("photos", "a folder of data is a setting: --data.root photos"),
        ("data.root=x", "a setting starts with two dashes: --data.root=x"),
    ],
)
def test_a_word_too_many_names_the_setting(capsys, word, hint):
    for words in (["train", "finetune"], ["eval", "runs/a"]):
        with pytest.raises(SystemExit):
            main([*words, word])
        assert f"unrecognized arguments: {word}; {hint}\n" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["features", "a", "b", "-o", "c", word])
    assert f"unrecognized arguments: {word}\n" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "words",
    [
        ["train", "quickstart", *map(str, SMALL)],
        ["eval", "classify_pets", "--data.root", "photos"],
        ["features", "classify_pets", "photos", "-o", "out.safetensors"],
        ["token-labels", "make", "--model", "classify_pets", "--data.root", ".", "--output", "out"],
        ["bench", "pale_nano"],
        ["predict", "photos"],
        ["serve"],
    ],
    ids=lambda words: words[0],
)
def test_a_missing_gpu_is_one_line_in_every_command(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    for split in ("photos", "train", "val"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (32, 32)).save(tmp_path / split / name / "1.png")
    code, _, err = run(capsys, *words, "--device", "cuda")
    assert code == 1
    assert re.match("pale: (no CUDA device is available|device 'cuda' needs a CUDA device)", err)
    assert err.count("\n") == 1


def test_a_folder_that_holds_a_run_is_not_overwritten(capsys, tmp_path):
    (tmp_path / "log.jsonl").touch()
    code, _, err = run(capsys, "train", "quickstart", "--output", tmp_path)
    assert code == 1
    assert f"resume it: pale train --resume {tmp_path}" in err


def test_the_speed_of_reading_is_measured(capsys):
    words = ["bench", "data", "quickstart", "--data.workers", 1, "--batch", 4, "--seconds", 0.2]
    code, out, err = run(capsys, *words, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["workers"] == 1
    assert found["images"] % 4 == 0
    assert found["images_per_s"] * found["worker_ms"] == pytest.approx(1000)
    assert "images/s with 1 workers" in run(capsys, *words)[1]
    assert "--seconds must be greater than 0" in run(capsys, *words[:-1], 0)[2]


def test_settings_are_told_from_options():
    rest, overrides = split_overrides(
        [
            "train",
            "x",
            "--a.b",
            "1e-3",
            "--output",
            "o",
            "--c=[1, 2]",
            "--d",
            "null",
            "--e=a: [",
            "--f",
            "{split}",
            "--g={a: 1}",
            "-h",
        ],
        ["--output"],
    )
    assert rest == ["train", "x", "--output", "o", "-h"]
    assert overrides == {
        "a.b": "1e-3",
        "c": [1, 2],
        "d": None,
        "e": "a: [",
        "f": "{split}",
        "g": {"a": 1},
    }


def test_help_of_train_tells_about_settings(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "--data.root DIR --optim.lr 1e-3" in capsys.readouterr().out
