"""Calls of the command line whose exit code, JSON keys and written files are kept."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Words = tuple[Any, ...]
TASKS = ("classification", "segmentation", "detection")
OPTIONS = "{depths: [1, 1, 1, 1], channels: [4, 4, 8, 8], heads: [2, 2, 2, 2]}"
# Changes of the quickstart recipes that make a step in some ten milliseconds, with everything on.
TINY: dict[str, tuple[str, Words]] = {
    "classification": (
        "quickstart",
        (
            *("--model.options", OPTIONS, "--model.drop_path", 0.2, "--ema", 0.9, "--epochs", 4),
            *("--data.size", 32, "--data.samples", 22, "--data.val_samples", 6, "--batch", 8),
            *("--warmup_epochs", 0.5, "--optim.lr", 0.04, "--mix", "{}", "--augment", "{}"),
        ),
    ),
    "segmentation": (
        "quickstart.segmentation",
        (
            *("--model.options", OPTIONS, "--model.width", 4, "--model.auxiliary", 4),
            *("--model.drop_path", 0.2, "--model.dropout", 0.1, "--data.size", 32),
            *("--data.samples", 22, "--data.val_samples", 6, "--augment.crop", 32, "--batch", 8),
            *("--augment.distort", 1.0, "--steps", 11, "--warmup_steps", 2, "--eval_every", 1),
        ),
    ),
    "detection": (
        "quickstart.detection",
        (
            *("--model.options", OPTIONS, "--model.heads.width", 8, "--model.heads.box_width", 8),
            *("--model.heads.mask_width", 4, "--model.heads.proposals", 20, "--data.size", 48),
            *("--model.heads.rpn_samples", 16, "--model.heads.box_samples", 8, "--batch", 8),
            *("--data.samples", 22, "--data.val_samples", 6, "--steps", 11, "--warmup_steps", 2),
        ),
    ),
}
SAVING: Words = ("--log_every", 1, "--saving.every_steps", 2, "--saving.keep", 1)


def training(task: str, folder: str) -> Words:
    """Return the command that trains the tiny model of a task."""
    recipe, changes = TINY[task]
    return ("train", recipe, *changes, *SAVING, "--device", "cpu", "--output", folder)


@dataclass(frozen=True)
class Case:
    """A call of the command line.

    Attributes:
        name: of the case.
        words: the call; names of files are relative to a folder that `write_data` filled.
        before: calls that come before it, whose result is not kept.
        slow: whether it takes more than five seconds.
        json: whether it prints JSON.
        ignored: key paths that depend on the machine or on versions, and all below them.
    """

    name: str
    words: Words
    before: tuple[Words, ...] = ()
    slow: bool = False
    json: bool = False
    ignored: tuple[str, ...] = ()


SCENES: Words = ("--data.kind", "scenes", "--data.samples", 6, "--data.size", 32)
BENCH: Words = ("--size", 32, "--rounds", 2, "--seconds", 1, "--device", "cpu", "--json", "b.json")
FEATURES: Words = ("features", "classification/run", "images/train", "-o", "f.safetensors")
COCO: Words = ("data", "coco", "images/train/a", "instances", "-o", "own.json")

REPORTS = (
    Case("cost", ("cost", "pale_nano", "--json"), json=True),
    Case("cost paper", ("cost", "--paper", "--json"), json=True),
    Case("info", ("info", "pale_nano", "--json"), json=True),
    Case("doctor", ("doctor", "--json"), json=True, ignored=("devices[].others",)),
    Case("recipes", ("recipes", "--json"), json=True),
    Case("recipes show", ("recipes", "show", "quickstart", "--json"), json=True),
    *(Case(f"train {task}", (*training(task, "run"), "--json"), json=True) for task in TASKS),
    *(
        Case(f"eval {task}", ("eval", f"{task}/final.safetensors", "-o", "e", "--json"), json=True)
        for task in TASKS
    ),
    Case(
        "bench data",
        ("bench", "data", "quickstart", "--seconds", 0.2, "--data.size", 32, "--json"),
        json=True,
    ),
    *(
        Case(
            f"predict {task}",
            ("predict", "cat.jpg", "--task", task, "--device", "cpu", "-o", "out", "--json"),
            json=True,
        )
        for task in TASKS
    ),
    Case("report", ("report", "classification/run", "--json"), json=True),
    Case("features", (*FEATURES, "--json"), json=True),
    Case("probe", ("probe", "f.safetensors", "f.safetensors", "--json"), (FEATURES,), json=True),
    Case(
        "probe with neighbours",
        ("probe", "f.safetensors", "f.safetensors", "--neighbours", "2", "--json"),
        (FEATURES,),
        json=True,
    ),
    Case(
        "token-labels make",
        (
            *("token-labels", "make", "--model", "classification/run", *SCENES),
            *("--size", 64, "--output", "labels", "--device", "cpu", "--json"),
        ),
        json=True,
    ),
    Case("data check", ("data", "check", "images", "--workers", 1, "--json"), json=True),
    Case(
        "data check masks",
        (
            *("data", "check", "masked", "--images", "images", "--masks", "masks"),
            *("--classes", "classes.txt", "--workers", 1, "--json"),
        ),
        json=True,
    ),
    Case(
        "data check objects",
        (
            *("data", "check", ".", "--images", "images/train/a", "--annotations", "own.json"),
            *("--workers", 1, "--json"),
        ),
        (COCO,),
        json=True,
    ),
    Case("data coco", (*COCO, "--json"), json=True),
    Case(
        "data convert", ("data", "convert", "masked", "out", "--kind", "yolo", "--json"), json=True
    ),
    Case("data pack", ("data", "pack", "images", "shards", "--json"), json=True),
    Case("view attention", ("view", "attention", "cat.jpg", "-o", "a.png", "--json"), json=True),
    Case("view pales", ("view", "pales", "pale_nano", "-o", "p.png")),
    Case("weights", ("weights", "--json"), json=True),
    Case("weights list", ("weights", "list", "--json"), json=True),
    Case("weights show", ("weights", "show", "classify_pets", "--json"), json=True),
    Case("weights verify", ("weights", "verify", "--json"), json=True),
    Case("weights export", ("weights", "export", "classify_pets", "hub", "--json"), json=True),
    Case(
        "weights pack",
        ("weights", "pack", "classification/final.safetensors", "-o", "s.safetensors", "--json"),
        json=True,
    ),
    Case("completion", ("completion", "bash")),
    Case(
        "export",
        ("export", "pale_nano", "-o", "m.pt2", "--sizes", "1x64x64", "--fixed", "--json"),
        slow=True,
        json=True,
    ),
    Case("bench models", ("bench", "pale_nano", "test_vit", "--batch", 1, *BENCH)),
    Case("bench op", ("bench", "op", "pale_nano", "--batch", 1, "--stages", 4, *BENCH)),
    Case("demo", ("demo", "--no-training", "-o", "page", "--json"), json=True),
)

ERRORS = (
    Case("nothing", ()),
    Case("help", ("--help",)),
    Case("help of a command", ("data", "check", "--help")),
    Case("version", ("--version",)),
    Case("unknown command", ("trane",)),
    Case("unknown option", ("cost", "--sizes", "3")),
    Case("no word of a choice", ("predict", "cat.jpg", "--task", "painting")),
    Case("no number", ("cost", "--size", "large", "large")),
    Case("missing argument", ("data", "coco")),
    Case("missing sub-command", ("data",)),
    Case("unknown model", ("cost", "pale_nanno")),
    Case("bad architecture", ("info", "pale_nano", "--attention", "diagonal")),
    Case("size of zero", ("cost", "--size", 0, 0)),
    Case("recipes show without a name", ("recipes", "show")),
    Case("unknown recipe", ("recipes", "show", "quickstrat")),
    Case("train nothing", ("train",)),
    Case("train an unknown recipe", ("train", "quickstrat")),
    Case("train two things", ("train", "quickstart", "--resume", "classification/run")),
    Case("unknown setting", ("train", "quickstart", "--optim.learning_rate", 1)),
    Case("setting of a wrong type", ("train", "quickstart", "--epochs", "many")),
    Case("setting out of range", ("train", "quickstart", "--epochs", 0)),
    Case("setting without a value", ("train", "quickstart", "--epochs")),
    Case("setting without effect", ("train", "quickstart", "--data.root", "images")),
    Case("train without data", ("train", "imagenet.pale_t")),
    Case("train on a missing folder", ("train", "small_data.pale_t", "--data.root", "nowhere")),
    Case("train into a run", ("train", "quickstart", "--output", "classification/run")),
    Case("config that is missing", ("train", "--config", "nothing.yaml")),
    Case("config that is no YAML", ("train", "--config", "broken.png")),
    Case("resume what is no run", ("train", "--resume", "images")),
    Case(
        "resume with other weights",
        ("train", "--resume", "classification/run", "--init", "cat.jpg"),
    ),
    Case("resume another batch", ("train", "--resume", "classification/run", "--batch", 4)),
    Case("allow changed data of a new run", ("train", "quickstart", "--allow-changed-data")),
    Case("evaluate a missing file", ("eval", "nothing.safetensors")),
    Case("evaluate a broken file", ("eval", "broken.safetensors")),
    Case("predict a missing image", ("predict", "nothing.jpg", "--device", "cpu")),
    Case("predict a broken image", ("predict", "broken.png", "--device", "cpu", "--json")),
    Case(
        "predict a good and a broken image",
        ("predict", "cat.jpg", "broken.png", "--device", "cpu", "--json"),
        json=True,
    ),
    Case("predict with missing weights", ("predict", "cat.jpg", "--weights", "nothing")),
    Case("predict with broken weights", ("predict", "cat.jpg", "--weights", "broken.safetensors")),
    Case(
        "predict another task",
        ("predict", "cat.jpg", "--weights", "classify_pets", "--task", "detection"),
    ),
    Case("predict no frame", ("predict", "cat.jpg", "--every", 0)),
    Case("slide a classifier", ("predict", "cat.jpg", "--slide")),
    Case("check a missing folder", ("data", "check", "nowhere")),
    Case("check bad images", ("data", "check", "bad", "--workers", 1, "--json"), json=True),
    Case("check masks without classes", ("data", "check", "masked", "--masks", "masks")),
    Case("pack into no space", ("data", "pack", "images", "shards", "--shard-mb", 0)),
    Case("convert missing masks", ("data", "coco", "images", "nowhere", "-o", "own.json")),
    Case("report of no run", ("report", "images")),
    Case("features of no run", ("features", "nowhere", "images", "-o", "f.safetensors")),
    Case("probe missing features", ("probe", "nothing", "nothing")),
    Case(
        "labels of a bad part",
        ("token-labels", "make", "--model", "x", "--output", "y", "--part", "a"),
    ),
    Case("unknown weights", ("weights", "show", "nothing")),
    Case("weights of a folder without an index", ("weights", "--folder", "images")),
    Case("pack broken weights", ("weights", "pack", "broken.safetensors", "-o", "s.safetensors")),
    Case("view into an unknown format", ("view", "attention", "cat.jpg", "-o", "a.txt")),
    Case("view a missing photo", ("view", "attention", "nothing.jpg", "-o", "a.png")),
    Case("view stage zero", ("view", "attention", "cat.jpg", "--stage", 0, "-o", "a.png")),
    Case(
        "view a stage that is not there",
        ("view", "pales", "pale_nano", "--stage", 9, "-o", "p.png"),
    ),
    Case("export into an unknown format", ("export", "pale_nano", "-o", "m.abc")),
    Case("export no size", ("export", "pale_nano", "-o", "m.pt2", "--sizes", "large")),
    Case("bench a stage that is not there", ("bench", "op", "pale_nano", "--stages", 9)),
    Case("bench no image", ("bench", "pale_nano", "--batch", 0, *BENCH)),
    Case("serve with a short token", ("serve", "--token", "abc", "--port", 0)),
    Case("serve with no batch", ("serve", "--batch", 0, "--port", 0)),
    Case("demo of a missing photo", ("demo", "--photo", "nothing.jpg")),
    Case("unknown shell", ("completion", "cmd")),
)

CASES = {case.name: case for case in (*REPORTS, *ERRORS)}


def write_data(root: Path, cat: Path) -> None:
    """Write small datasets of each kind, broken files, and a photo."""
    (root / "cat.jpg").write_bytes(cat.read_bytes())
    (root / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    (root / "broken.safetensors").write_bytes(b"\xff" * 64)
    for split in ("train", "val"):
        for i, name in enumerate("ab"):
            for j in range(4):
                path = root / "images" / split / name / f"{j}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (40, 40), (60 * j, 90 * i, 90 + (split == "val"))).save(path)
        for kind in ("images", "masks", "labels"):
            (root / "masked" / kind / split).mkdir(parents=True)
        for j in range(3):
            mask = np.zeros((32, 32), np.uint8)
            mask[8:20, 4 + j : 20] = 1
            image = np.stack([mask * 90, mask * 40 + 9, mask + j + 3 * (split == "val")], 2)
            Image.fromarray(image).save(root / "masked" / "images" / split / f"{j}.png")
            Image.fromarray(mask).save(root / "masked" / "masks" / split / f"{j}.png")
            label = "0 .4 .4 .5 .4\n" if j else "0 .1 .2 .6 .2 .6 .6\n"
            (root / "masked" / "labels" / split / f"{j}.txt").write_text(label)
    (root / "masked" / "classes.txt").write_text("0 ground 0 0 0\n1 box 255 0 0\n")
    (root / "masked" / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [box]")
    (root / "instances").mkdir()
    for j in range(4):
        mask = np.zeros((40, 40), np.uint8)
        mask[5:20, 5:20], mask[25:35, 10 : 20 + j] = 1, 2
        Image.fromarray(mask).save(root / "instances" / f"{j}.png")
    for split in ("train", "val"):
        for name in "ab":
            path = root / "bad" / split / name / "x.png"
            path.parent.mkdir(parents=True)
            path.write_bytes((root / "broken.png").read_bytes())


def formats(path: Path) -> Any:
    """Return the content of a JSON file, the lines of a .jsonl, the header of a .csv; None for other files."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        header = path.read_text().splitlines()[0].split(",")
        return dict.fromkeys(header)
    return None
