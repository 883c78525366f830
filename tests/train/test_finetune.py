"""`pale train finetune`: from folders of images to a model, and checks before the first step."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.recipes import CLASSIFICATION, DETECTION, SEGMENTATION, SMALL

import pale.core.memory
from pale.cli.main import main
from pale.data.checks.settings import CheckSettings
from pale.data.sources.images import balance_classes, hold_out, read_folder
from pale.errors import DataError, MemoryShortageError
from pale.recipes import get
from pale.recipes.files import recipe_to_yaml
from pale.tasks.freezing import freeze_parameters
from pale.tasks.layouts import recognise
from pale.tools.check_data import check_data
from pale.train import preflight
from pale.train.distributed import World
from pale.train.finetuning import has_bf16_instructions, plan_finetuning
from pale.train.loop import build_trainer
from pale.train.settings import RunSettings
from pale.train.state import build_state
from pale.weights import zoo

WORLD = World(torch.device("cpu"))
TINY = {"model.options": SMALL["model.options"], "model.weights": None, "model.new_head": False}
FAST = TINY | {"data.size": 32, "data.workers": 0}


def words_of(changes):
    return [word for name, value in changes.items() for word in (f"--{name}", json.dumps(value))]


def write_photos(root, counts, suffix="jpg"):
    """Folders of one colour each, so that a model can learn them."""
    rng = np.random.default_rng(0)
    for number, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 60, (40, 40, 3), dtype=np.uint8)
            pixels[..., number % 3] += 150
            Image.fromarray(pixels).save(root / name / f"{name}{i}.{suffix}")
    return root


def plan(changes, **settings):
    recipe, notes = plan_finetuning(
        RunSettings(recipe="finetune", device="cpu", **settings), changes
    )
    return recipe.changed(changes), notes


def test_plain_class_folders_are_split_and_start_from_included_weights(tmp_path):
    root = write_photos(tmp_path / "photos", {"cat": 10, "dog": 10})
    recipe, notes = plan({"data.root": str(root)})
    assert (recipe.kind, recipe.model.name) == ("classification", "pale_nano")
    assert str(recipe.model.weights) == "general_nano"
    assert any("included weights general_nano" in note for note in notes)
    task = recipe.task()
    assert (len(task.train_source), len(task.val_source)) == (16, 4)
    assert sorted(task.val_source.labels) == [0, 0, 1, 1]
    assert any("4 of 20 images are held out for validation" in note for note in task.notes)
    # Splits that exist are used.
    split = tmp_path / "split"
    for name in ("train", "val"):
        write_photos(split / name, {"cat": 2, "dog": 2})
    recipe, _ = plan({"data.root": str(split)})
    assert (recipe.data.train, recipe.data.hold_out) == ("train", 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_model_is_that_of_the_given_weights_on_every_device(tmp_path, device):
    root = {"data.root": str(write_photos(tmp_path, {"cat": 5, "dog": 5}))}

    def model(changes, init=None):
        start = None if init is None else Path(init)
        settings = RunSettings(recipe="finetune", device=device, init=start)
        return plan_finetuning(settings, root | changes)[0].changed(changes).model.name

    assert model({}, "pets_scratch") == model({"model.weights": "pets_scratch"}) == "pale_nano"
    assert model({}, "general_tiny") == "pale_tiny"
    assert model({"model.name": "pale_small"}, "pets_scratch") == "pale_small"  # an error later
    assert model({}) == {"cpu": "pale_nano", "cuda": "pale_tiny"}[device]


@pytest.mark.parametrize(("fast", "precision"), [(True, "bf16"), (False, "auto")])
def test_the_precision_follows_the_processor(tmp_path, monkeypatch, fast, precision):
    monkeypatch.setattr("pale.train.finetuning.has_bf16_instructions", lambda: fast)
    changes = {"data.root": str(write_photos(tmp_path, {"cat": 5, "dog": 5}))}
    recipe, notes = plan(changes)
    assert recipe.precision == precision
    assert any("precision bf16" in note for note in notes) is fast
    assert plan(changes | {"precision": "fp32"})[0].precision == "fp32"


@pytest.mark.parametrize(
    ("reported", "fast"),
    [({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({"avx2": True}, False)],
)
def test_bf16_instructions_are_those_that_pytorch_reports(monkeypatch, reported, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: reported, raising=False)
    assert has_bf16_instructions() is fast


def test_the_largest_zoo_classifier_of_a_model_is_the_start(tmp_path):
    rows = [("pets", "pale_nano", 37), ("general", "pale_nano", 500), ("tiny", "pale_tiny", 900)]
    for name, model, classes in rows:
        entry = zoo.ZooEntry(name, "classification", model, "f", "c", 1, "0", 1, classes)
        zoo.add_entry(entry, tmp_path)
    assert zoo.best_start("classification", "pale_nano", tmp_path) == "general"
    assert zoo.best_start("classification", "pale_tiny", tmp_path) == "tiny"
    assert zoo.best_start("classification", "pale_base", tmp_path) is None


def test_a_single_class_is_an_error_that_names_the_folder_below(tmp_path):
    write_photos(tmp_path / "photos", {"cat": 2, "dog": 2})
    plan_one, _ = plan({"data.root": str(tmp_path)})
    with pytest.raises(DataError, match=r"one class, photos, .* use --data\.root .*photos$"):
        plan_one.task()
    write_photos(tmp_path / "cats" / "all", {"cat": 4})
    single, _ = plan({"data.root": str(tmp_path / "cats" / "all")})
    with pytest.raises(DataError, match=r"one class, cat, and a classifier needs at least two$"):
        single.task()


def test_class_folders_with_the_same_folders_inside_are_a_warning(tmp_path):
    for name in ("photos", "fresh"):
        write_photos(tmp_path / name, {"cat": 2, "dog": 2})
    _, notes = plan({"data.root": str(tmp_path)})
    (warning,) = [note for note in notes if note.startswith("warning")]
    assert "the classes are fresh, photos, and each holds the same folders (cat, dog)" in warning
    assert f"--data.root {tmp_path / 'fresh'}" in warning
    write_photos(tmp_path / "other", {"cat": 2})
    _, notes = plan({"data.root": str(tmp_path)})
    assert not [note for note in notes if note.startswith("warning")]


def test_masks_and_annotations_are_recognised_without_splits(tmp_path):
    masks = tmp_path / "masks_set"
    for folder in ("images", "masks"):
        (masks / folder).mkdir(parents=True)
    for i in range(5):
        Image.new("RGB", (32, 32)).save(masks / "images" / f"{i}.jpg")
        Image.fromarray(np.full((32, 32), i % 2 * 7, np.uint8)).save(masks / "masks" / f"{i}.png")
    found = recognise(masks, {})
    assert found.kind == "segmentation"
    assert found.settings["data.classes"] == ["0 value 0", "7 value 7"]
    assert found.settings["data.hold_out_by"] == "name"
    recipe, _ = plan({"data.root": str(masks)})
    task = recipe.task()
    assert (len(task.train_source), len(task.val_source)) == (4, 1)
    assert str(recipe.model.init) == "general_nano"
    (masks / "classes.txt").write_text("0 background\n7 thing\n")
    assert recognise(masks, {}).settings["data.classes"] == "classes.txt"

    objects = tmp_path / "objects"
    (objects / "images").mkdir(parents=True)
    box = {"category_id": 3, "bbox": [1, 1, 9, 9], "area": 81, "iscrowd": 0}
    content = {
        "images": [{"id": i, "file_name": f"{i}.jpg", "width": 32, "height": 32} for i in range(5)],
        "annotations": [box | {"id": i + 1, "image_id": i} for i in range(5)],
        "categories": [{"id": 3, "name": "thing"}],
    }
    for i in range(5):
        Image.new("RGB", (32, 32)).save(objects / "images" / f"{i}.jpg")
    (objects / "labels.json").write_text(json.dumps(content))
    # `pale data check` recognises both: it must not take images and masks for classes.
    found, _ = check_data(CheckSettings(masks, workers=1))
    assert found.classes == ["background", "thing"]
    found, _ = check_data(CheckSettings(objects, workers=1))
    assert found.classes == ["thing"]
    assert found.splits["train"]["objects"] == 5

    official = tmp_path / "coco"
    for split in ("train2017", "val2017"):
        shutil.copytree(objects / "images", official / split)
        (official / "annotations").mkdir(exist_ok=True)
        path = official / "annotations" / f"instances_{split}.json"
        path.write_text(json.dumps(content))
    found = recognise(official, {})
    assert (found.settings["data.train"], found.settings["data.val"]) == ("train2017", "val2017")
    assert found.settings["data.images"] == "{split}"
    found, _ = check_data(CheckSettings(official, workers=1))
    assert list(found.splits) == ["train2017", "val2017"]

    found = recognise(objects, {})
    assert found.kind == "detection"
    assert found.settings["data.images"] == "images"
    assert found.settings["model.heads.masks"] is False
    task = plan({"data.root": str(objects)})[0].task()
    assert (len(task.train_source), len(task.val_source)) == (4, 1)
    (objects / "images").rename(objects / "photos 2024")
    assert recognise(objects, {}).settings["data.images"] == "photos 2024"
    (objects / "photos 2024").rename(objects / "images")
    # A missing image is an error, or left out.
    missing = task.train_source.name(0)
    (objects / "images" / missing.rpartition("/")[2]).unlink()
    with pytest.raises(ValueError, match="there is no such image"):
        plan({"data.root": str(objects)})[0].task()
    task = plan({"data.root": str(objects), "data.unreadable": "skip"})[0].task()
    assert len(task.train_source) == 3
    assert any("1 unreadable image is left out" in note for note in task.data_notes)


def write_masks(root: Path, values: list[int]) -> None:
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    mask = np.resize(np.repeat(values, 8), (32, 32)).astype(np.uint8)
    for i in range(5):
        Image.new("RGB", (32, 32)).save(root / "images" / f"{i}.jpg")
        Image.fromarray(mask).save(root / "masks" / f"{i}.png")


def test_255_is_a_class_in_masks_of_two_values_and_unlabelled_in_others(tmp_path):
    """Tools write binary masks with 0 and 255; 255 was ignored, so that one class remained, an error."""
    write_masks(tmp_path / "two", [0, 255])
    given = {"data.root": str(tmp_path / "two")}
    recipe, notes = plan(given)
    assert recipe.data.ignore == ()
    assert any("so 255 is a class here" in note for note in notes)
    task = recipe.task()
    assert task.train_source.classes.names == ["value 0", "value 255"]
    found, _ = check_data(CheckSettings(tmp_path / "two", workers=1))
    assert found.classes == ["value 0", "value 255"]
    assert sorted(np.unique(task.train_source.mask(0))) == [0, 1]
    (tmp_path / "two/classes.txt").write_text("0 background\n255 thing\n")
    assert plan(given)[0].task().train_source.classes.names == ["background", "thing"]
    with pytest.raises(ValueError, match="got 1 that are not ignored"):
        plan(given | {"data.ignore": [255]})[0].task()

    write_masks(tmp_path / "three", [0, 1, 255])
    given = {"data.root": str(tmp_path / "three")}
    assert plan(given)[0].data.classes == ("0 value 0", "1 value 1")
    assert plan(given)[0].data.ignore == (255,)
    assert len(plan(given | {"data.ignore": []})[0].data.classes) == 3
    assert plan(given | {"data.ignore": [1]})[0].data.classes == ("0 value 0", "255 value 255")


def test_images_without_class_folders_and_a_missing_root_are_explained(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg")
    with pytest.raises(ValueError, match="move the images of each class into a folder"):
        recognise(tmp_path, {})
    with pytest.raises(ValueError, match=r"data\.root is not set"):
        recognise(None, {})


def test_a_recipe_is_fitted_to_a_small_set():
    recipe, notes = get("finetune").fitted(10, 2)
    assert recipe.batch == 10
    assert recipe.epochs == recipe.min_steps
    assert recipe.eval_every == -(-recipe.epochs // 12)
    assert len(notes) == 2
    assert recipe.fitted(10, 2) == (recipe, [])
    assert get("imagenet.pale_t").fitted(10, 2) == (get("imagenet.pale_t"), [])
    large, notes = get("finetune").fitted(100_000, 1)
    assert (large.epochs, notes) == (30, [])


def test_the_journey_from_photos_to_a_prediction(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = write_photos(tmp_path / "my photos", {"red": 8, "green": 8, "blue": 8})
    changes = FAST | {"min_steps": 20, "optim.lr": 0.003, "batch": 64}
    code = main(["train", "finetune", "--data.root", str(root), *words_of(changes)])
    out = capsys.readouterr().out
    assert code == 0
    assert "6 of 24 images are held out for validation" in out.replace("\n", " ")
    assert "batch 18 instead of 64" in out
    assert "20 epochs instead of" not in out  # 30 epochs of one step each are enough
    assert "fewer than 300 rarely suffice: raise --min_steps" in out
    commands = [line.strip() for line in out.splitlines() if line.startswith("  pale ")]
    assert [shlex.split(line)[1] for line in commands] == ["predict", "serve", "export"]
    assert main(shlex.split(commands[0])[1:]) == 0
    assert "my photos" not in capsys.readouterr().err
    saved = (tmp_path / "runs/finetune/recipe.yaml").read_text()
    assert "batch: 18" in saved


def test_unreadable_files_are_named_and_skipped_on_request(tmp_path):
    root = write_photos(tmp_path / "photos", {"cat": 6, "dog": 6})
    (root / "cat" / "phone.HEIC").write_bytes(b"x")
    given = {"data.root": str(root)}
    with pytest.raises(
        ValueError, match=r"phone.HEIC: this format is not supported; .*unreadable skip"
    ):
        plan(given)[0].task()
    (root / "cat" / "phone.HEIC").unlink()
    for name in ("cat/cat0.jpg", "dog/dog0.jpg"):
        path = root / name
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"dog0.jpg|cat0.jpg"):
        plan(given)[0].task()
    (root / "cat" / "phone.heic").write_bytes(b"x")
    task = plan(given | {"data.unreadable": "skip"})[0].task()
    assert len(task.train_source) + len(task.val_source) == 10
    noted = " ".join(task.notes)
    for name in ("phone.heic", "cat0.jpg", "dog0.jpg"):
        assert name in noted


def test_balanced_sampling_repeats_rare_classes(tmp_path):
    root = write_photos(tmp_path / "photos", {"cat": 9, "dog": 2})
    source = read_folder(root)
    balanced = balance_classes(source)
    assert np.bincount(balanced.labels).tolist() == [9, 9]
    assert set(balanced.indices) == set(range(11))
    kept, _ = hold_out(source, 0.2, 0, "name")
    recipe, _ = plan({"data.root": str(root), "data.balanced": True})
    assert len(recipe.task().train_source) == 2 * max(np.bincount(kept.labels))


@pytest.mark.parametrize(("level", "frozen"), [("nothing", 0), ("early", 3), ("backbone", 5)])
def test_freezing_keeps_a_part_of_the_weights(level, frozen):
    model = get("quickstart").override(TINY).model.build(4, 32)
    freeze_parameters(model, level)
    names = [
        ("stages.0.merge",),
        ("stages.0.blocks",),
        ("stages.1",),
        ("stages.2",),
        ("stages.3",),
        ("norm", "head"),
    ]
    trained = [
        p.requires_grad for part in names for n, p in model.named_parameters() if n.startswith(part)
    ]
    counts = [sum(n.startswith(part) for n, _ in model.named_parameters()) for part in names]
    assert trained == [False] * sum(counts[:frozen]) + [True] * sum(counts[frozen:])


@pytest.mark.parametrize("name", ["quickstart", "quickstart.segmentation", "quickstart.detection"])
def test_only_heads_change_with_a_frozen_backbone(tmp_path, name):
    small = {"quickstart": CLASSIFICATION, "quickstart.segmentation": SEGMENTATION}
    changes = small.get(name, DETECTION) | {"model.freeze": "backbone"}
    recipe = get(name).override(changes | {"steps": 2, "warmup_steps": 0})
    trainer = build_trainer(recipe, tmp_path, WORLD)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    before = {n: p.clone() for n, p in trainer.state.model.named_parameters()}
    trainer.fit(quiet=True)
    changed = {
        n for n, p in trainer.state.model.named_parameters() if not torch.equal(p, before[n])
    }
    assert changed
    assert not [n for n in changed if "stages." in n]


def test_warnings_name_short_runs_few_images_and_uneven_classes(tmp_path):
    root = write_photos(tmp_path / "photos", {"cat": 41, "dog": 4})
    recipe, _ = plan({"data.root": str(root), "min_steps": None, "batch": 64} | FAST)
    trainer = build_trainer(recipe, tmp_path / "run", WORLD)
    text = " ".join(trainer.notes)
    for words in (
        "batch 64 is larger than the training set of 36 images",
        "steps; fewer than 300 rarely suffice: raise --epochs or lower --batch",
        "fewer than 5 training images (dog: 3)",
        "uneven classes (cat: 33 images, dog: 3)",
    ):
        assert words in text
    assert get("quickstart").task().class_counts() == {}


def test_too_little_memory_is_an_error_before_the_first_step(tmp_path, monkeypatch):
    root = write_photos(tmp_path / "photos", {"cat": 10, "dog": 10})
    recipe, _ = plan({"data.root": str(root)} | FAST)
    monkeypatch.setattr(preflight, "available_memory", lambda: 10_000)
    with pytest.raises(MemoryShortageError, match=r"a step needs about .* GB .*--accumulate"):
        build_trainer(recipe, tmp_path / "run", WORLD)
    monkeypatch.setattr(preflight, "available_memory", lambda: None)
    trainer = build_trainer(recipe, tmp_path / "run", WORLD)
    assert pale.core.memory.available_memory() is None or pale.core.memory.available_memory() > 0
    state = build_state(recipe, trainer.task, WORLD)
    args = (WORLD, trainer.task, trainer.data, trainer.stream, state)
    before = torch.random.get_rng_state()
    one = preflight.estimate_memory(recipe, *args)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert preflight.estimate_memory(recipe.override({"batch": 32}), *args) > 1.5 * one


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", "[" * 100_000, '{"annotations": 5}', '{"annotations": {"a": 1}}']
)
def test_annotations_of_another_form_are_named(tmp_path, content):
    for split in ("train", "val"):
        (tmp_path / f"{split}.json").write_text(content)
    with pytest.raises(DataError, match=r"train\.json.*write it again"):
        recognise(tmp_path, {})
