"""Segmentation in the training loop: files, two processes, wrong input, and learning."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.datasets import colours, recipe_on_masks, write_masks
from support.processes import torchrun
from support.recipes import SEGMENTATION, segmentation_recipe

import pale
from pale.cli.main import main
from pale.recipes.files import recipe_to_yaml
from pale.train.distributed import World
from pale.train.log import read
from pale.train.loop import train
from pale.weights.read import load_weights
from pale.weights.write import save_weights

CPU = World(torch.device("cpu"))


def run(capsys, *argv):
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("segmentation")
    train(recipe_on_masks(write_masks(folder / "data")), folder / "run", CPU, quiet=True)
    return folder


def test_a_run_writes_weights_figures_and_a_report_with_overlays(trained):
    events = read(trained / "run/log.jsonl")
    last = [e for e in events if e["event"] == "eval"][-1]
    assert last["images"] == 2
    assert 0 <= last["miou"] <= last["aacc"] <= 100
    page = (trained / "run/report.html").read_text()
    for words in (
        "Worst images",
        "Best images",
        "IoU, %",
        "validation mIoU",
        "crescent",
        "0.png",
    ):
        assert words in page, words
    assert page.count("data:image/jpeg;base64,") == 2
    about = load_weights(trained / "run").about
    assert about["classes"][:2] == ["background", "disc"]
    assert about["recipe"]["kind"] == "segmentation"


def test_a_run_resumes_bit_equal(tmp_path):
    recipe = segmentation_recipe(saving__every_steps=3)
    train(recipe, tmp_path / "a", CPU, quiet=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b/checkpoints/step_00000006")
    (tmp_path / "b/weights.safetensors").unlink()
    train(recipe, tmp_path / "b", CPU, resume=True, quiet=True)
    starts = [e["step"] for e in read(tmp_path / "b/log.jsonl") if e["event"] == "start"]
    assert starts == [0, 3]
    one, two = (load_file(tmp_path / run / "weights.safetensors") for run in "ab")
    assert all(torch.equal(one[name], two[name]) for name in one)


def curve(folder: Path) -> list[tuple[float, float]]:
    return [(e["loss"], e["grad_norm"]) for e in read(folder / "log.jsonl") if e["event"] == "step"]


@pytest.mark.slow
def test_two_processes_train_as_one_with_synchronised_batch_norm(tmp_path):
    train(segmentation_recipe(), tmp_path / "one", CPU, quiet=True)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(segmentation_recipe()))
    torchrun("train", "--config", tmp_path / "recipe.yaml", "--output", tmp_path / "two")
    for a, b in zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, rel=2e-3)
    one, two = (load_file(tmp_path / run / "weights.safetensors") for run in ("one", "two"))
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=2e-3), name
    # Five validation images on two processes.
    last = [e for e in read(tmp_path / "two/log.jsonl") if e["event"] == "eval"][-1]
    assert last["images"] == 5


@pytest.mark.slow
def test_two_processes_evaluate_as_one_on_a_set_that_does_not_divide(trained, capsys):
    root = write_masks(trained / "odd", counts=(1, 5))
    words = ("eval", trained / "run", "--data.root", root, "--json", "--device", "cpu")
    code, out, _ = run(capsys, *words, "-o", trained / "one")
    assert code == 0
    alone = json.loads(out)
    both = json.loads(torchrun(*words, "-o", trained / "two"))
    assert alone["single"]["images"] == alone["multi"]["images"] == 5
    assert both == alone


def test_eval_prints_both_protocols_and_writes_tables(trained, capsys):
    code, out, _ = run(capsys, "eval", trained / "run", "--data.root", trained / "data")
    assert code == 0
    assert "single-scale: mIoU" in out
    assert "multi-scale: mIoU" in out
    assert "scale 0.75, 1, 1.25, 1.5, 1.75, with flip; at the size of the masks" in out
    table = (trained / "run/evaluation/per_class.csv").read_text().splitlines()
    assert table[0].startswith("class,share,single_iou,single_accuracy,single_precision,multi_iou")
    assert len(table) == 10
    details = json.loads((trained / "run/evaluation/evaluation_multi.json").read_text())
    assert details["inference"]["flip"] is True
    assert sum(map(sum, details["details"]["confusion"])) == 2 * 32 * 32
    code, out, _ = run(
        capsys, "eval", trained / "run", "--protocol", "single", "--test.mode", "slide",
        "--test.window", "16", "--test.stride", "12",
    )  # fmt: skip
    assert "windows of 16 every 12" in out
    assert "multi" not in out


def test_predict_writes_masks_overlays_and_shares(trained, capsys):
    out_dir = trained / "predicted"
    source = trained / "data/images/val"
    weights = ["--weights", trained / "run", "-o", out_dir]
    code, out, _ = run(capsys, "predict", source, *weights, "--slide")
    assert code == 0, out
    with Image.open(out_dir / "0_mask.png") as mask:
        mask.load()
    assert (mask.mode, mask.size) == ("P", (32, 32))
    assert np.asarray(mask).max() < 9
    shown = np.asarray(mask.convert("RGB"))
    assert np.array_equal(shown, colours()[np.asarray(mask)])
    with Image.open(out_dir / "1_predicted.jpg") as over:
        assert over.size == (32, 32)
    lines = [json.loads(line) for line in (out_dir / "predictions.jsonl").read_text().splitlines()]
    assert [sum(c["share"] for c in line["classes"]) for line in lines] == pytest.approx([100, 100])
    code, out, _ = run(capsys, "predict", source / "0.png", *weights, "--json", "--multi")
    assert json.loads(out)["picture"] == str(source / "0.png")  # kept name
    code, _, err = run(capsys, "predict", trained / "no.png", *weights)
    assert code == 1
    assert "there is no image or folder" in err


def harm(root: Path, what: str) -> None:
    mask = root / "masks/train/1.png"
    if what == "mask":
        mask.unlink()
    elif what == "size":
        Image.new("L", (31, 32)).save(mask)
    elif what == "label":
        Image.new("L", (32, 32), 9).save(root / "masks/val/1.png")
    elif what == "colour":
        Image.new("RGB", (32, 32), (1, 2, 3)).save(mask)
    elif what == "empty":
        for path in (root / "images/val").iterdir():
            path.unlink()
    elif what in ("train", "val"):
        for path in (root / "masks" / what).iterdir():
            Image.new("L", (32, 32), 255).save(path)
    elif what == "image":
        (root / "images/train/2.png").write_bytes(b"not an image")
    elif what == "classes":
        (root / "classes.txt").unlink()
    elif what == "folder":
        (root / "masks").rename(root / "labels")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("mask", r"images/train/1\.png have no mask in .*masks/train/1\.png"),
        ("size", r"images/train/1\.png is 32x32, its mask 31x32; both sizes must be equal"),
        ("label", r"masks/val/1\.png: the label 9 is out of range, there are 0 to 8"),
        ("colour", r"masks/train/1\.png: the colour 1 2 3 is not in the class list"),
        ("empty", r"there are no images in .*images/val"),
        ("image", r"images/train/2\.png: cannot be read as an image"),
        ("train", "no labelled pixel in the training set"),
        ("val", "no labelled pixel in the validation set"),
        ("classes", r"there is no class list .*classes\.txt; an example of a line"),
        ("folder", r"there is no folder .*masks/.* with the masks"),
    ],
)
def test_bad_input_is_an_error_before_training_starts(tmp_path, what, message):
    write_masks(tmp_path / "data")
    harm(tmp_path / "data", what)
    with pytest.raises(ValueError, match=message):
        train(recipe_on_masks(tmp_path / "data"), tmp_path / "run", CPU, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.images": None}, "needs data.images; give --data.images VALUE"),
        ({"loss.class_weights": [1.0, 2.0]}, "needs a factor for each of 9 classes, got 2"),
        ({"batch": 1}, "batch norm needs at least two images at a time, got batch 1"),
        ({"warmup_steps": 6}, "warmup_steps must be smaller than steps, got 6 and 6"),
        ({"data.classes": None, "required": []}, "data.classes is not set"),
        ({"data.masks": None, "required": []}, "data.images and data.masks are not set"),
        ({"data.classes": [0, 1]}, "data.classes: names must be strings, got 0; quote them"),
        ({"data.ignore": [70000]}, "values in a mask are 0 to 65535, got 70000"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_settings_that_are_missing_or_do_not_fit_are_reported(tmp_path, changes, message):
    root = write_masks(tmp_path)
    with pytest.raises(ValueError, match=message):
        recipe_on_masks(root, required=["data.images"]).override(changes).task()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_loss_needs_the_tensors_of_a_prepared_batch_alone(dropout):
    """A recorded step has no other inputs."""
    task = segmentation_recipe(model__dropout=dropout).task()
    data = task.train_data(torch.device("cpu"))
    batch = task.prepare(task.collate([data[0, i] for i in range(2)]), 0)
    tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
    loss = task.loss(task.model().train(), tensors)
    assert loss.isfinite()
    assert ("keep" in tensors) == bool(dropout)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_segmenters_can_be_recorded_with_every_loss(tmp_path, dropout, capsys):
    changes = {"loss__class_weights": [1.0] * 8 + [0.5], "loss__ohem": 0.7, "loss__dice": 0.5}
    recipe = segmentation_recipe(model__dropout=dropout, precision="fp32", **changes)
    world, losses = World(torch.device("cuda")), {}
    for graph in (False, True):
        run = tmp_path / str(graph)
        train(recipe.override({"cuda_graph": graph}), run, world)
        losses[graph] = [e["loss"] for e in read(run / "log.jsonl") if e["event"] == "step"]
    assert "as a CUDA graph" in capsys.readouterr().out
    assert losses[True] == pytest.approx(losses[False], rel=0.02)


def test_colour_masks_hold_out_and_class_weights_train_too(tmp_path):
    root = write_masks(tmp_path / "data")
    for path in sorted((root / "masks/train").iterdir()):
        Image.fromarray(colours()[np.asarray(Image.open(path))]).save(path)
    recipe = recipe_on_masks(
        root,
        data__images="images/train",
        data__masks="masks/train",
        data__hold_out=0.5,
        loss__class_weights="balanced",
        loss__ohem=0.7,
        loss__dice=0.5,
    )
    task = recipe.task()
    assert (len(task.train_data(torch.device("cpu"))), len(task.val_data())) == (2, 2)
    assert len(task.class_weights) == 9
    outcome = train(recipe, tmp_path / "run", CPU, quiet=True)
    assert outcome.step == 6


def test_data_check_shows_the_imbalance_and_every_problem(tmp_path, capsys):
    root = write_masks(tmp_path, counts=(6, 2))
    words = (
        "data",
        "check",
        root,
        "--images",
        "images",
        "--masks",
        "masks",
        "--classes",
        "classes.txt",
    )
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "train: 6 images, 0.0 % of the pixels unlabelled" in out
    assert "note: class that never occurs in validation" in out
    assert "ready to train" in out
    Image.open(root / "images/train/0.png").save(root / "images/val/9.bmp")
    Image.open(root / "masks/train/0.png").save(root / "masks/val/9.png")
    Image.new("L", (32, 32), 77).save(root / "masks/train/3.png")
    code, out, _ = run(capsys, *words, "--json")
    assert code == 1
    found = json.loads(out)
    problems = {p["kind"]: p["items"] for p in found["problems"]}
    assert "the label 77 is out of range" in problems["cannot be used"][0]
    assert problems["the same image in two splits"][0].endswith("val/9.bmp")
    shares = [c["share"] for c in found["splits"]["train"]["classes"].values()]
    assert sum(shares) == pytest.approx(100)
    code, _, err = run(capsys, "data", "check", root, "--recipe", "imagenet.pale_t")
    assert code == 1
    assert "is not a segmentation recipe" in err
    harm(root, "val")
    code, out, _ = run(capsys, *words)
    assert code == 1
    assert "no labels for training or validation (1)" in out
    assert "val: no labelled pixel" in out


MASKS = ("--images", "images", "--masks", "masks", "--classes", "classes.txt")


def test_data_check_accepts_datasets_without_splits_and_splits_of_any_name(tmp_path, capsys):
    root = write_masks(tmp_path, counts=(6, 2))
    flat = ("--images", "images/train", "--masks", "masks/train", "--classes", "classes.txt")
    code, _, err = run(capsys, "data", "check", root, *flat)
    assert code == 1
    assert "images/train/train in" in err
    assert "--hold-out" in err
    code, out, _ = run(capsys, "data", "check", root, *flat, "--hold-out", "0.5", "--json")
    assert code == 0
    assert {name: s["images"] for name, s in json.loads(out)["splits"].items()} == {
        "train": 3,
        "held out": 3,
    }
    for folder in ("images", "masks"):
        (root / folder / "val").rename(root / folder / "test")
    code, out, _ = run(capsys, "data", "check", root, *MASKS, "--splits", "train", "test")
    assert code == 0
    assert "test: 2 images" in out
    (root / "train.txt").write_text("0\n1\n")
    (root / "val.txt").write_text("2\n")
    words = ("data", "check", root, *flat, "--lists", "{split}.txt", "--json")
    code, out, _ = run(capsys, *words)
    assert [s["images"] for s in json.loads(out)["splits"].values()] == [2, 1]
    Image.new("L", (32, 32), 77).save(root / "masks/train/0.png")
    assert run(capsys, *words)[0] == 1
    assert run(capsys, *words, "--unlisted", "ignore")[0] == 0


@pytest.mark.parametrize("hold_out", [(), ("--hold-out", "0.5")], ids=["splits", "hold out"])
def test_data_check_lists_every_missing_mask(tmp_path, capsys, hold_out):
    root = write_masks(tmp_path, counts=(6, 2))
    (root / "masks/train/1.png").unlink()
    (root / "masks/train/4.png").unlink()
    flat = ("--images", "images/train", "--masks", "masks/train", "--classes", "classes.txt")
    words = (*flat, *hold_out) if hold_out else MASKS
    code, out, _ = run(capsys, "data", "check", root, *words)
    assert code == 1
    assert "problem: no mask (2)" in out
    assert f"  {root}/images/train/1.png\n  {root}/images/train/4.png\n" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (MASKS[:4], "--classes is not given; to check masks give --classes FILE"),
        (MASKS[2:], "--images is not given; to check masks give --images DIR"),
        (
            MASKS[:2],
            "give --masks DIR, the folder of masks (for annotations in COCO format: --annotations FILE)",
        ),
        (MASKS[4:], "--images is not given"),
        ((*MASKS, "--sheet", "s.png"), "--sheet draws folders of classes"),
        (("--annotations", "a.json", "--masks", "masks"), "--masks does not apply to objects"),
        (("--annotations", "a.json", "--recipe", "x"), "--recipe does not apply to objects"),
        (("--annotations", "a.json", "--sheet", "s.png"), "--sheet does not apply to objects"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_data_check_refuses_options_that_do_not_fit(tmp_path, capsys, words, message):
    code, _, err = run(capsys, "data", "check", write_masks(tmp_path), *words)
    assert code == 1
    assert message in err


def test_init_is_an_option_and_reports_what_was_loaded(tmp_path, capsys):
    options = {k: tuple(v) for k, v in SEGMENTATION["model.options"].items()}
    classifier = pale.create_model("pale_nano", num_classes=3, **options)
    save_weights(tmp_path / "c.safetensors", classifier.state_dict(), {})
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(segmentation_recipe(steps=3)))
    code, out, err = run(
        capsys, "train", "--config", tmp_path / "recipe.yaml", "--output", tmp_path / "run",
        "--init", tmp_path / "c.safetensors", "--device", "cpu",
    )  # fmt: skip
    assert code == 0, err
    assert "tensors of the backbone loaded; new: the heads" in " ".join(out.split())
    assert any(e["event"] == "note" for e in read(tmp_path / "run/log.jsonl"))
    # Evaluation does not need the classifier any more.
    (tmp_path / "c.safetensors").unlink()
    assert run(capsys, "eval", tmp_path / "run", "--protocol", "single")[0] == 0


def test_masks_with_classes_that_the_weights_lack_are_refused(trained, capsys):
    root = write_masks(trained / "other")
    (root / "classes.txt").write_text("a\nb\n")
    code, _, err = run(capsys, "eval", trained / "run", "--data.root", root)
    assert code == 1
    assert "the weights have 9 classes, the data has 2" in err
    lines = (trained / "data/classes.txt").read_text().splitlines()
    names = [line.split()[1] for line in lines]
    names[1], names[2] = names[2], names[1]
    (root / "classes.txt").write_text("\n".join(names))
    code, _, err = run(capsys, "eval", trained / "run", "--data.root", root)
    assert code == 1
    assert "class 1 is 'disc' in the weights, 'ring' in the class list of the data" in err


@pytest.mark.data
@pytest.mark.slow
def test_ade20k_trains_and_evaluates_end_to_end(tmp_path, capsys, project):
    archive = (
        Path(os.environ.get("PALE_DATA", project.parent / "shared/data")) / "ade20k-sample.tar"
    )
    if not archive.is_file():
        pytest.skip(f"{archive} is not there; PALE_DATA names the folder")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    small = {
        name: SEGMENTATION[name] for name in ("model.options", "model.width", "model.auxiliary")
    }
    small |= {"steps": 2, "warmup_steps": 1, "batch": 2, "data.workers": 0, "augment.crop": 128}
    words = [w for name, value in small.items() for w in (f"--{name}", json.dumps(value))]
    root = tmp_path / "ade20k-sample"
    code, _, err = run(
        capsys, "train", "ade20k.upernet_nano", "--data.root", root, "--device", "cpu",
        "--output", tmp_path / "run", "--test.short", "128", *words,
    )  # fmt: skip
    assert code == 0, err
    code, out, err = run(
        capsys, "eval", tmp_path / "run", "--json", "--device", "cpu", "--multi.short", "64",
        "--multi.scales", "[0.75, 1.25]",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["single"]["images"] == found["multi"]["images"] == 3
    assert len(found["multi"]["per_class"]) == 150
    assert found["single"]["per_class"][0]["class"] == "wall"
    # At the masks' own size: every labelled pixel is counted.
    counted = json.loads((tmp_path / "run/evaluation/evaluation_single.json").read_text())
    labelled = sum(
        int((np.asarray(Image.open(path)) > 0).sum())
        for path in (root / "annotations/validation").glob("*.png")
    )
    assert sum(map(sum, counted["details"]["confusion"])) == labelled


@pytest.mark.slow
def test_upernet_learns_to_separate_shapes_from_background(tmp_path):
    """On validation scenes. The large version, with all classes, is `pale train quickstart.segmentation`."""
    root = write_masks(tmp_path / "data", counts=(96, 16))
    for path in (root / "masks").rglob("*.png"):
        Image.fromarray((np.asarray(Image.open(path)) > 0).astype(np.uint8)).save(path)
    (root / "classes.txt").write_text("background\nshape\n")
    recipe = recipe_on_masks(
        root,
        model__options={"depths": [1] * 4, "channels": [16, 24, 32, 48], "heads": [2] * 4},
        model__width=24,
        model__drop_path=0.0,
        augment__distort=0.0,
        augment__scale=[1.0, 1.0],
        optim__lr=4e-3,
        batch=16,
        steps=160,
        warmup_steps=10,
        eval_every=100,
    )
    outcome = train(recipe, tmp_path / "run", CPU, quiet=True)
    # All background is some 35 mIoU and 70 % of the pixels.
    assert outcome.figures["miou"] > 70, outcome.figures
