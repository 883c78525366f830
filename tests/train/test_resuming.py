"""A run resumes only with its own data and checkpoints, and overwrites nothing silently."""

import hashlib
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.datasets import (
    recipe_on_coco,
    recipe_on_masks,
    write_coco,
    write_image_folders,
    write_masks,
)
from support.label_files import detection_on, segmentation_on, write_voc, write_yolo
from support.mixtures import mixture_recipe, write_mixture, write_tag_shard
from support.recipes import classification_recipe

from pale.cli.main import main
from pale.data.sources import identity
from pale.data.sources.class_list import ClassEntry, ClassList
from pale.data.sources.images import ImageFiles, hold_out, read_folder, read_list
from pale.data.sources.masks import MaskFiles
from pale.data.sources.scenes import CLASSES as SHAPES
from pale.data.sources.scenes import SceneImages, Scenes
from pale.data.sources.shards import ShardFiles, write_shards
from pale.recipes.schema import Recipe
from pale.train import log
from pale.train.distributed import World
from pale.train.loop import train

ALONE = World(torch.device("cpu"))
CLASSES = "the classes of the training set are not those of"
SAMPLES = "the training set is not that of"


def on_folder(root: Path, **changes) -> Recipe:
    write_image_folders(root)
    return classification_recipe(
        data__kind="folder", data__root=str(root), batch=4, epochs=2, **changes
    )


def on_list(root: Path) -> Recipe:
    recipe = on_folder(root)
    for split in ("train", "val"):
        lines = [f"{split}/{c}/{i}.png {c}" for c in ("a", "b") for i in range(4)]
        (root / f"{split}.txt").write_text("\n".join(lines))
    return recipe.override({"data.kind": "list", "data.train": "train.txt", "data.val": "val.txt"})


def on_shards(root: Path) -> Recipe:
    recipe = on_folder(root)
    repack(root)
    return recipe.override({"data.kind": "shards", "data.root": str(root / "packed")})


def repack(root: Path, classes: tuple[str, ...] | None = None) -> None:
    shutil.rmtree(root / "packed", ignore_errors=True)
    for split in ("train", "val"):
        source = read_folder(root / split)
        source.classes = list(classes or source.classes)
        write_shards(source, root / "packed", split, 2**20)


def on_masks(root: Path) -> Recipe:
    return recipe_on_masks(write_masks(root))


def on_coco(root: Path) -> Recipe:
    return recipe_on_coco(write_coco(root))


def on_mixture(root: Path) -> Recipe:
    return mixture_recipe(write_mixture(root))


def on_yolo(root: Path) -> Recipe:
    return detection_on("yolo", write_yolo(root))


def on_yolo_masks(root: Path) -> Recipe:
    return segmentation_on("yolo", write_yolo(root))


def on_voc(root: Path) -> Recipe:
    return detection_on("voc", write_voc(root))


def swap(path: Path, one: str, two: str) -> None:
    text = path.read_text().replace(one, "\0").replace(two, one).replace("\0", two)
    path.write_text(text)


def swap_values(root: Path) -> None:
    path = root / "classes.txt"
    path.write_text(path.read_text().replace("1 disc", "2 disc").replace("2 ring", "1 ring"))


def rename_folders(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "a").rename(root / split / "z")


def rename_in_lists(root: Path) -> None:
    for split in ("train", "val"):
        swap(root / f"{split}.txt", "png a", "png z")


def rename_categories(root: Path) -> None:
    for split in ("train", "val"):
        swap(root / "annotations" / f"{split}.json", '"disc"', '"ring"')


def remove_from_json(root: Path) -> None:
    path = root / "annotations/train.json"
    content = json.loads(path.read_text())
    gone = content["images"].pop()["id"]
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != gone]
    path.write_text(json.dumps(content))


def remove_mask(root: Path) -> None:
    for what in ("images", "masks"):
        (root / what / "train/3.png").unlink()


def rename_in_mixture(root: Path) -> None:
    for split in ("train", "val"):
        (root / "folder" / split / "dog").rename(root / "folder" / split / "wolf")


def retag_in_mixture(root: Path) -> None:
    tags = [["bee"], ["car"], ["dog"], *[["bee", "car"]] * 9]
    write_tag_shard(root / "tags" / "train-000000.tar", tags)


def remove_from_yolo(root: Path) -> None:
    for path in ("images/train/3.png", "labels/train/3.txt"):
        (root / path).unlink()


def swap_in_label_map(root: Path) -> None:
    swap(root / "labelmap.txt", f"{SHAPES[0]}:", f"{SHAPES[1]}:")


def shorten_list_of_voc(root: Path) -> None:
    path = root / "ImageSets/Main/train.txt"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def remove_and_repack(root: Path) -> None:
    (root / "train/b/3.png").unlink()
    repack(root)


def relabel(root: Path) -> None:
    swap(root / "train.txt", "b/0.png b", "b/0.png a")


def replace_one(root: Path) -> None:
    (root / "train/b/3.png").rename(root / "train/b/9.png")


def resume(capsys, run: Path, *words: str) -> tuple[int, str]:
    code = main(["train", "--resume", str(run), "--device", "cpu", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def longer(recipe: Recipe) -> list[str]:
    """Return options with which a finished run has more steps to do."""
    if recipe.steps is None:
        return ["--epochs", str(recipe.epochs + 1)]
    return ["--steps", str(recipe.steps + 2)]


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (on_folder, rename_folders, CLASSES),
        (on_list, rename_in_lists, CLASSES),
        (on_shards, lambda root: repack(root, ("x", "y")), CLASSES),
        (on_masks, lambda root: swap(root / "classes.txt", " disc ", " ring "), CLASSES),
        (on_masks, swap_values, CLASSES),
        (on_coco, rename_categories, CLASSES),
        (on_folder, lambda root: (root / "train/b/3.png").unlink(), SAMPLES),
        (on_folder, replace_one, SAMPLES),
        (on_list, relabel, SAMPLES),
        (on_shards, remove_and_repack, SAMPLES),
        (on_masks, remove_mask, SAMPLES),
        (on_coco, remove_from_json, SAMPLES),
        (on_mixture, rename_in_mixture, CLASSES),
        (on_mixture, lambda root: (root / "folder/train/dog/1.png").unlink(), SAMPLES),
        (on_mixture, retag_in_mixture, SAMPLES),
        (on_yolo, lambda root: swap(root / "data.yaml", SHAPES[0], SHAPES[1]), CLASSES),
        (on_yolo, remove_from_yolo, SAMPLES),
        (on_yolo_masks, lambda root: swap(root / "data.yaml", SHAPES[0], SHAPES[1]), CLASSES),
        (on_yolo_masks, remove_from_yolo, SAMPLES),
        (on_voc, swap_in_label_map, CLASSES),
        (on_voc, shorten_list_of_voc, SAMPLES),
    ],
    ids=[
        *("folder-classes", "list-classes", "shards-classes", "masks-classes", "masks-values"),
        *("coco-classes", "folder-fewer", "folder-renamed", "list-labels", "shards-fewer"),
        *("masks-fewer", "coco-fewer", "mixture-classes", "mixture-fewer", "mixture-tags"),
        *("yolo-classes", "yolo-fewer", "yolo-masks-classes", "yolo-masks-fewer"),
        *("voc-classes", "voc-fewer"),
    ],
)
def test_a_run_does_not_resume_with_other_data(tmp_path, capsys, make, change, message):
    run, recipe = tmp_path / "run", make(tmp_path / "data")
    train(recipe, run, ALONE, quiet=True)
    before = contents(run)
    change(tmp_path / "data")
    code, words = resume(capsys, run, *longer(recipe))
    assert code == 1, words
    assert message in words
    assert "Traceback" not in words
    assert contents(run) == before
    code, more = resume(capsys, run, *longer(recipe), "--allow-changed-data")
    if message == SAMPLES:
        assert f"pale train --resume {run} --allow-changed-data" in words
        assert code == 0, more
        assert SAMPLES in more
        # From there on these are the run's data.
        assert resume(capsys, run)[0] == 0
    else:
        assert code == 1  # other classes are never allowed


@pytest.mark.parametrize("make", [on_folder, on_masks, on_coco])
def test_a_dataset_may_move(tmp_path, capsys, make):
    recipe = make(tmp_path / "data")
    train(recipe, tmp_path / "run", ALONE, quiet=True)
    (tmp_path / "data").rename(tmp_path / "moved")
    root = ["--data.root", str(tmp_path / "moved")]
    code, words = resume(capsys, tmp_path / "run", *longer(recipe), *root)
    assert code == 0, words


def test_other_samples_of_a_hold_out_are_noticed(tmp_path, capsys):
    recipe = on_folder(tmp_path / "data", data__hold_out=0.25)
    train(recipe, tmp_path / "run", ALONE, quiet=True)
    code, words = resume(capsys, tmp_path / "run", "--epochs", "3", "--data.hold_out", "0.5")
    assert code == 1
    assert "6 samples before, 4 now" in words


def rewrite(path: Path, state: object) -> None:
    """Replace trainer.pt of a checkpoint, with its checksums."""
    torch.save(state, path / "trainer.pt")
    content = (path / "trainer.pt").read_bytes()
    manifest = json.loads((path / "manifest.json").read_text())
    sums = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"]["trainer.pt"] = sums
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_without_the_identity_of_its_data_still_resumes(tmp_path, capsys):
    recipe = on_folder(tmp_path / "data")
    train(recipe, tmp_path / "run", ALONE, quiet=True)
    for path in (tmp_path / "run/checkpoints").iterdir():
        state = torch.load(path / "trainer.pt", weights_only=True)
        del state["data"]
        rewrite(path, state)
    code, words = resume(capsys, tmp_path / "run", "--epochs", "3")
    assert code == 0, words


def test_allowing_other_data_belongs_to_resume(capsys):
    assert main(["train", "quickstart", "--allow-changed-data"]) == 1
    assert "--allow-changed-data needs --resume RUN" in capsys.readouterr().err


def without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def all_damaged(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        (path / "trainer.pt").write_bytes(b"damaged")


def as_before(run: Path) -> None:
    """Change a log to that of versions which did not log checkpoints."""
    shutil.rmtree(run / "checkpoints")
    lines = []
    for entry in log.read(run / "log.jsonl"):
        entry.pop("data_sha256", None)
        if entry["event"] != "saved":
            lines.append(json.dumps(entry))
    (run / "log.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("harm", [without_checkpoints, all_damaged, as_before])
def test_progress_without_a_usable_checkpoint_is_an_error_and_nothing_is_overwritten(
    tmp_path, capsys, harm
):
    train(classification_recipe(), tmp_path / "run", ALONE, quiet=True)
    harm(tmp_path / "run")
    before = contents(tmp_path / "run")
    code, words = resume(capsys, tmp_path / "run")
    assert code == 1
    assert "shows progress" in words
    assert "has no usable checkpoint" in words
    assert f"--model.weights {tmp_path / 'run'}" in words
    assert contents(tmp_path / "run") == before
    # The way out that the message names.
    other = ["--output", str(tmp_path / "new"), "--model.weights", str(tmp_path / "run")]
    config = ["train", "--config", str(tmp_path / "run/recipe.yaml"), "--device", "cpu"]
    assert main([*config, *other, "--model.new_head", "false"]) == 0


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(tmp_path, capsys):
    train(classification_recipe(), tmp_path / "whole", ALONE, quiet=True)
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(tmp_path / "whole/recipe.yaml", run)
    kept = (tmp_path / "whole/log.jsonl").read_text().splitlines()[:3]  # start and two steps
    (run / "log.jsonl").write_text("\n".join(kept) + "\n")
    code, words = resume(capsys, run)
    assert code == 0, words
    assert "has no checkpoint yet; the run starts at step 0" in words
    assert (run / "weights.safetensors").read_bytes() == (
        tmp_path / "whole/weights.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "line", [b"\xff\xfe\n", b"7\n", b'{"step": "x"}\n', b"[" * 100_000 + b"\n"]
)
def test_a_bad_line_in_the_log_stops_neither_resuming_nor_the_report(tmp_path, capsys, line):
    train(classification_recipe(), tmp_path, ALONE, quiet=True)
    path = tmp_path / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], line, *lines[3:]]))
    code, words = resume(capsys, tmp_path, "--epochs", "4")
    assert code == 0, words
    steps = [e["step"] for e in log.read(path) if e["event"] == "step"]
    assert steps == list(range(1, 12))


def test_one_damaged_byte_anywhere_in_the_log_does_not_stop_a_run(tmp_path):
    path = tmp_path / "log.jsonl"
    writer = log.Log(path, 0)
    for step in range(3):
        writer.write("step", step=step, loss=0.5, name="naïve")
    writer.close()
    content = path.read_bytes()
    for i in range(len(content)):
        path.write_bytes(content[:i] + bytes([content[i] ^ 0x80]) + content[i + 1 :])
        log.Log(path, 2).close()
        assert len(log.read(path)) >= 1


@pytest.mark.parametrize("state", [["not a dict"], {"step": "3"}, {"step": 3}], ids=str)
def test_a_checkpoint_that_holds_no_state_of_a_run_is_refused(tmp_path, capsys, state):
    train(classification_recipe(), tmp_path, ALONE, quiet=True)
    for path in (tmp_path / "checkpoints").iterdir():
        rewrite(path, state)
    code, words = resume(capsys, tmp_path, "--epochs", "4")
    assert code == 1
    assert "is not the state of a run" in words
    assert "Traceback" not in words


def test_a_checkpoint_with_code_in_it_is_refused_without_running_it(tmp_path, capsys):
    class Harm:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harmed",))

    train(classification_recipe(), tmp_path / "run", ALONE, quiet=True)
    for path in (tmp_path / "run/checkpoints").iterdir():
        rewrite(path, {"step": Harm()})
    code, words = resume(capsys, tmp_path / "run", "--epochs", "4")
    assert code == 1
    assert "cannot be read as tensors and numbers alone" in words
    assert "weights_only" not in words  # no advice to load it all the same
    assert "Traceback" not in words
    assert not (tmp_path / "harmed").exists()


def test_identities_differ_by_name_order_and_class_alone(tmp_path):
    names, labels = [f"a/{i}.png" for i in range(5)], [0, 0, 1, 1, 1]

    def digest(paths, classes_of, root="x"):
        return identity.identify(ImageFiles(Path(root), paths, classes_of, ["p", "q"]), ["p", "q"])

    own = digest(names, labels)
    assert own == digest(list(names), list(labels), root="elsewhere")
    others = [
        digest(names[::-1], labels),
        digest([*names[:4], "a/9.png"], labels),
        digest(names, [0, 1, 1, 1, 1]),
        digest([*names, "b"], [*labels, 0]),
        digest(["a/0.png\0a/1.png", *names[2:], "z"], labels),
    ]
    assert len({own.digest, *(other.digest for other in others)}) == 6
    source = ImageFiles(Path("x"), names, labels, ["p", "q"])
    parts = hold_out(source, 0.4, 0)
    assert identity.identify(parts[0], ["p", "q"]).digest != own.digest
    scenes = [identity.identify(SceneImages(Scenes(4, 32, seed)), "ab").digest for seed in (0, 1)]
    assert scenes[0] != scenes[1]


def test_identities_of_masks_name_values_and_survive_a_move():
    def of(root, values, folder="train"):
        entries = [ClassEntry(value, name) for value, name in zip(values, "ab", strict=True)]
        pairs = [
            (Path(f"{root}/images/{folder}/{i}.jpg"), Path(f"{root}/masks/{folder}/{i}.png"))
            for i in range(3)
        ]
        return identity.identify(MaskFiles(pairs, ClassList(entries)), ["a", "b"])

    assert of("/x", (1, 2)) == of("/elsewhere/y", (1, 2))
    assert of("/x", (1, 2)).classes == ("a (value 1)", "b (value 2)")
    assert of("/x", (2, 1)).classes != of("/x", (1, 2)).classes


def test_a_million_names_are_identified_within_seconds():
    count = 1_000_000
    names = [f"n{i // 1000:08d}/n{i // 1000:08d}_{i}.JPEG" for i in range(count)]
    labels = (np.arange(count) // 1000).tolist()
    source = ImageFiles(Path("/data"), names, labels, [str(i) for i in range(1000)])
    began = time.perf_counter()
    found = identity.identify(source, source.classes)
    spent = time.perf_counter() - began
    assert found.samples == count
    assert spent < 5, f"{spent:.1f} s"


def test_shards_are_identified_by_names_and_sizes(tmp_path):
    write_image_folders(tmp_path)
    write_shards(read_folder(tmp_path / "train"), tmp_path / "a", "train", 2**20)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    one, two = (ShardFiles(tmp_path / name, "train") for name in ("a", "b"))
    assert identity.identify(one, one.classes) == identity.identify(two, two.classes)
    Image.effect_noise((90, 90), 60).save(tmp_path / "train/a/0.png")
    write_shards(read_folder(tmp_path / "train"), tmp_path / "c", "train", 2**20)
    three = ShardFiles(tmp_path / "c", "train")
    assert (
        identity.identify(three, one.classes).digest != identity.identify(one, one.classes).digest
    )
    (tmp_path / "list.txt").write_text("train/a/0.png a\ntrain/b/0.png b\n")
    listed = read_list(tmp_path / "list.txt", tmp_path)
    assert identity.identify(listed, listed.classes).samples == 2
