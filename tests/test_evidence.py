"""The evidence scripts: every planned run can be built, results merge into tables, labels are drawn as published."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.datasets import write_image_folders, write_masks

from pale.core.settings import vary
from pale.data.sources.coco import CocoFiles
from pale.train.loop import Trainer

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = ("planned_runs", "evidence_models", "evidence_plan", "evidence_cityscapes", "evidence")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return {name: __import__(name) for name in NAMES}


@pytest.fixture
def results(tmp_path: Path, scripts: dict[str, ModuleType]) -> Path:
    """A folder with results of the trials, in which the last setting is the best of every model."""
    plan = scripts["evidence_plan"]
    folder = tmp_path / "results"
    folder.mkdir()
    for model in plan.MODELS:
        for score, trial in enumerate(plan.TRIALS):
            (folder / f"trials-{model}-{trial}-0.json").write_text(json.dumps({"last": score}))
    return folder


def test_every_planned_run_has_a_name_of_its_own_and_a_model_that_can_be_built(scripts, results):
    plan = scripts["evidence_plan"]
    runs = [run for part in plan.PARTS.values() for run in part(Path("tiny200"), results)]
    assert len({run.name for run in runs}) == len(runs) == 69
    built = {}
    for run in runs:
        recipe = run.recipe
        key = json.dumps([recipe.kind, recipe.model.plain()])
        if key not in built:
            with torch.device("meta"):
                size = 64 if recipe.kind != "classification" else recipe.data.size
                built[key] = recipe.model.build(19, size)
    assert len(built) > 15
    assert all(run.init in {run.name for run in runs} for run in runs if run.init)


def test_models_of_one_size_are_compared_at_equal_maps(scripts):
    plan = scripts["evidence_plan"]
    images = torch.zeros(1, 3, 64, 64, device="meta")
    for model in plan.MODELS:
        recipe = plan.tuned(Path("tiny200"), model, "muon", 0)
        with torch.device("meta"):
            built = recipe.model.build(200, 64)
        sizes: set[int] = set()

        def note(module: Any, given: Any, made: Any, sizes: set[int] = sizes) -> None:
            if isinstance(made, torch.Tensor) and made.dim() == 4:
                sizes.update(made.shape[1:])

        for module in built.modules():
            module.register_forward_hook(note)
        built(images)
        assert 32 in sizes, model


def test_models_are_trained_with_their_best_setting(scripts, results):
    plan = scripts["evidence_plan"]
    runs = plan.models(Path("tiny200"), results)
    assert {run.recipe.augment.auto for run in runs} == {"rand-m6-mstd0.5-inc1"}
    assert {run.recipe.data.hold_out for run in runs} == {0}
    (results / "trials-swin-t-adamw-0.json").unlink()
    with pytest.raises(SystemExit, match="run the part trials first"):
        plan.models(Path("tiny200"), results)


def test_trials_never_evaluate_on_the_validation_images(scripts, results):
    runs = scripts["evidence_plan"].trials(Path("tiny200"), results)
    assert len(runs) == 12
    assert all(run.recipe.data.hold_out == 0.1 for run in runs)


@pytest.mark.parametrize(
    ("paper", "pairs", "expected"),
    [
        (0.5, [0.6, 0.7, 0.8], "confirmed"),
        (0.5, [-0.6, -0.7, -0.8], "not confirmed"),
        (0.5, [0.6, -0.7, 0.8], "too close to call"),
        (0.0, [0.1, -0.2, 0.1], "consistent"),
        (0.0, [0.9, 1.0, 1.1], "not confirmed"),
        (0.5, [0.6], "one seed: no verdict"),
    ],
)
def test_a_claim_is_judged_by_the_interval_of_paired_differences(scripts, paper, pairs, expected):
    assert scripts["evidence"].verdict(paper, pairs) == expected


def small(run: Any, data: dict[str, Any], **changes: Any) -> Any:
    """Return the recipe of a run for a CPU: a tiny model and a few images."""
    options = {"depths": [1, 1, 1, 1], "channels": [8, 8, 16, 16], "heads": [2, 2, 2, 2]}
    return vary(
        run.recipe,
        model={"name": "pale_nano", "options": options},
        data=data,
        batch=2,
        log_every=1,
        **changes,
    )


def options(out: Path, rehearse: int | None = None) -> argparse.Namespace:
    """Return the options of commands that train a list of runs."""
    return argparse.Namespace(
        out=out,
        workers=0,
        compile=False,
        graph="false",
        shard=(0, 1),
        labels=None,
        rehearse=rehearse,
    )


def small_runs(scripts: dict[str, ModuleType], root: Path, results: Path) -> list[Any]:
    """Return runs of two modes, each of two seeds, for a CPU."""
    write_image_folders(root)
    plan, data = scripts["evidence_plan"], {"root": root, "size": 32, "on_device": "nothing"}
    runs = [run for run in plan.modes(Path("x"), results) if run.label in ("parallel", "axial")]
    return [
        plan.Run(r.part, r.label, r.seed, small(r, data, epochs=1, warmup_epochs=0, eval_every=1))
        for r in runs[:4]
    ]


def test_a_rehearsal_has_few_steps_and_its_results_are_in_no_table(
    scripts, results, tmp_path, capsys
):
    evidence, planned = scripts["evidence"], scripts["planned_runs"]
    runs = small_runs(scripts, tmp_path / "data", results)
    args = options(tmp_path, rehearse=2)
    assert planned.choose_folder(args) == tmp_path / "rehearsal"
    planned.execute_all(runs, args)
    found = sorted((tmp_path / "rehearsal/results").iterdir())
    assert [path.name for path in found] == ["modes-axial-0.json", "modes-parallel-0.json"]
    row = json.loads(found[0].read_text())
    assert (row["rehearsal"], row["recipe"]["steps"], row["loss"][-1][0]) == (2, 2, 2)
    assert not list(results.glob("modes-*"))
    capsys.readouterr()
    planned.show_rehearsal(args, evidence._tables)
    shown = capsys.readouterr().out
    assert shown.startswith("**A rehearsal of a few steps: the figures are no results.**")
    assert "| axial | 1 | " in shown
    with pytest.raises(SystemExit, match=r"axial-0\.json is of a rehearsal, no result"):
        planned.load([tmp_path / "rehearsal/results"])
    with pytest.raises(SystemExit, match="was not written by a rehearsal"):
        planned.load([results], rehearsal=True)


def test_a_rehearsal_keeps_the_recipe_but_for_its_length(scripts, results):
    plan, planned = scripts["evidence_plan"], scripts["planned_runs"]
    for part in plan.PARTS.values():
        for run in part(Path("tiny200"), results):
            for steps in (1, 3):
                short, full = planned.shorten(run.recipe, steps).plain(), run.recipe.plain()
                changed = {name for name in full if full[name] != short[name]}
                assert changed <= {"steps", "warmup_steps", "min_steps", "log_every", "batch"}
                assert short["steps"] == steps


@pytest.mark.parametrize(
    ("method", "message"),
    [("make_step", "stopped after step 1"), ("evaluate", "ended; stopped before the next run")],
    ids=["in a step", "in the last evaluation"],
)
def test_a_signal_stops_the_list_of_runs_which_goes_on_when_repeated(
    scripts, results, tmp_path, monkeypatch, method, message
):
    planned = scripts["planned_runs"]
    runs, args = small_runs(scripts, tmp_path / "data", results)[:2], options(tmp_path)
    whole = getattr(Trainer, method)

    def interrupted(trainer: Trainer, *words: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return whole(trainer, *words)

    monkeypatch.setattr(Trainer, method, interrupted)
    with pytest.raises(SystemExit, match=message):
        planned.execute_all(runs, args)
    monkeypatch.setattr(Trainer, method, whole)
    done = method == "evaluate"
    first, second = (results / f"{run.name}.json" for run in runs)
    assert (first.exists(), second.exists()) == (done, False)
    planned.execute_all(runs, args)
    assert json.loads(first.read_text())["resumed"] is not done
    assert json.loads(second.read_text())["resumed"] is False


def write_tiny_imagenet(root: Path, train: int, val: int) -> None:
    """Write 200 classes as Stanford's archive has them, with some images each."""
    content = io.BytesIO()
    Image.new("RGB", (64, 64), "grey").save(content, "JPEG")
    lines = []
    for label in range(200):
        for folder, count in ((f"train/n{label:08d}/images", train), ("val/images", val)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                name = f"{label}_{i}.JPEG"
                (root / folder / name).write_bytes(content.getvalue())
                lines += [f"{name}\tn{label:08d}\t0\t0\t9\t9"] if folder[0] == "v" else []
    (root / "val/val_annotations.txt").write_text("\n".join(lines))


def test_tiny_imagenet_is_prepared_whole_or_in_part(scripts, tmp_path):
    evidence = scripts["evidence"]
    write_tiny_imagenet(tmp_path / "data", train=2, val=2)
    root = evidence.prepare(tmp_path / "data", tmp_path / "out", {"train": 2, "val": 1})
    names = {split: len(list((root / split).glob("*/*"))) for split in ("train", "val")}
    assert names == {"train": 400, "val": 200}
    assert len(list((root / "val").iterdir())) == 200  # `pale train` needs images of every class
    padded = Image.open(next((root / "train_padded").glob("*/*.png")))
    assert (padded.size, padded.getpixel((0, 0)), padded.getpixel((4, 4))) == (
        (72, 72),
        (0, 0, 0),
        (128, 128, 128),
    )
    with pytest.raises(SystemExit, match="must hold 100,000"):
        evidence.prepare(tmp_path / "data", tmp_path / "other")


def test_shards_that_start_together_prepare_the_data_once(scripts, tmp_path):
    planned, order = scripts["planned_runs"], []

    def prepare(name: str, started: Event, go_on: Event) -> None:
        with planned.alone(tmp_path / "out"):
            order.append(f"{name} begins")
            started.set()
            assert go_on.wait(30)
            order.append(f"{name} ends")

    first, second, go_on = Event(), Event(), Event()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(prepare, "first", first, go_on)
        assert first.wait(30)
        two = pool.submit(prepare, "second", second, go_on)
        assert not second.wait(0.3)
        go_on.set()
        one.result()
        two.result()
    assert order == ["first begins", "first ends", "second begins", "second ends"]


@pytest.mark.slow
def test_runs_write_results_that_become_tables_with_verdicts(scripts, results, tmp_path, capsys):
    evidence, plan = scripts["evidence"], scripts["evidence_plan"]
    write_image_folders(tmp_path / "data")
    args = options(tmp_path)
    data = {"root": tmp_path / "data", "size": 32, "on_device": "nothing"}
    runs = [run for run in plan.modes(Path("x"), results) if run.label in ("parallel", "axial")]
    for run in runs[:4]:
        recipe = small(run, data, epochs=1, warmup_epochs=0, eval_every=1)
        scripts["planned_runs"].execute(plan.Run(run.part, run.label, run.seed, recipe), args)
    written = sorted(path.name for path in results.glob("modes-*.json"))
    assert written == [
        f"modes-{mode}-{seed}.json" for mode in ("axial", "parallel") for seed in (0, 1)
    ]
    row = json.loads((results / "modes-axial-0.json").read_text())
    assert row["metric"] == "top1"
    assert row["recipe"]["model"]["attention"] == "axial"
    assert {"torch", "commit"} <= row["environment"].keys()
    # What is done is not repeated.
    before = (results / "modes-axial-0.json").stat().st_mtime_ns
    scripts["planned_runs"].execute(runs[1] if runs[1].label == "axial" else runs[0], args)
    assert (results / "modes-axial-0.json").stat().st_mtime_ns == before
    for path in results.glob("trials-*"):
        path.unlink()
    evidence.tables(argparse.Namespace(results=[results], output=tmp_path / "evidence.md"))
    text = (tmp_path / "evidence.md").read_text()
    assert "Prediction: Paper (ImageNet): parallel 83.4" in text
    assert "| axial | +1.0 | " in text
    assert "(2 seeds)" in text


@pytest.mark.slow
def test_a_dense_run_starts_from_the_backbone_of_another(scripts, results, tmp_path):
    plan = scripts["evidence_plan"]
    args = options(tmp_path)
    write_image_folders(tmp_path / "data")
    first = plan.pretraining(Path("x"), results)[0]
    data = {"root": tmp_path / "data", "size": 32, "on_device": "nothing"}
    recipe = small(first, data, epochs=1, warmup_epochs=0, eval_every=1)
    scripts["planned_runs"].execute(plan.Run(first.part, first.label, first.seed, recipe), args)
    write_masks(tmp_path / "masked", (4, 2))
    second = plan.cityscapes(tmp_path / "tiny200", results)[0]
    data = {"root": tmp_path / "masked"}
    augment = {"crop": (32, 32)}
    recipe = small(second, data, augment=augment, steps=2, warmup_steps=0, eval_every=1)
    recipe = vary(recipe, model={"width": 8, "auxiliary": 4})
    scripts["planned_runs"].execute(
        plan.Run(second.part, second.label, second.seed, recipe, second.init), args
    )
    row = json.loads((results / "cityscapes-upernet-pale-t-0.json").read_text())
    assert row["metric"] == "miou"
    assert row["recipe"]["model"]["init"].endswith("pretraining-pale-t-0")


SQUARE = [[0, 0], [1023, 0], [1023, 1023], [0, 1023]]
CAR = [[400, 400], [799, 400], [799, 799], [400, 799]]
HIDING = [[400, 400], [599, 400], [599, 799], [400, 799]]


def write_city(root: Path) -> None:
    image = root / "leftImg8bit/val/a"
    label = root / "gtFine/val/a"
    for folder in (image, label):
        folder.mkdir(parents=True)
    Image.new("RGB", (512, 256), "grey").save(image / "a_1_2_leftImg8bit.png")
    objects = [
        {"label": "road", "polygon": SQUARE},
        {"label": "car", "polygon": CAR},
        {"label": "cargroup", "polygon": [[1200, 0], [1399, 0], [1399, 199], [1200, 199]]},
        {"label": "license plate", "polygon": CAR},
        {"label": "pole", "polygon": HIDING},
        {"label": "static", "polygon": [[1600, 0], [1999, 0], [1999, 399], [1600, 399]]},
        {"label": "person", "polygon": SQUARE, "deleted": 1},
    ]
    content = {"imgWidth": 2048, "imgHeight": 1024, "objects": objects}
    (label / "a_1_2_gtFine_polygons.json").write_text(json.dumps(content))


def test_cityscapes_labels_are_drawn_from_polygons_in_their_order(scripts, tmp_path):
    city = scripts["evidence_cityscapes"]
    write_city(tmp_path / "city")
    city.prepare(tmp_path / "city", tmp_path / "out", {"val": 1}, {"val": 5})
    mask = np.asarray(Image.open(tmp_path / "out/masks/val/a_1_2.png"))
    names = list(city.CLASSES)
    assert mask.shape == (256, 512)
    assert mask[50, 50] == names.index("road")
    assert mask[150, 180] == names.index("car")
    assert mask[150, 120] == names.index("pole")  # drawn over the car
    assert mask[10, 320] == names.index("car")  # a group has the class of its members
    assert mask[10, 450] == mask[200, 400] == city.IGNORED  # not evaluated; not labelled
    source = CocoFiles(tmp_path / "out/instances_val.json", tmp_path / "out/images/val")
    objects = json.loads((tmp_path / "out/instances_val.json").read_text())["annotations"]
    assert [(each["category_id"], each["iscrowd"]) for each in objects] == [(3, 0), (3, 1)]
    assert objects[0]["bbox"] == [150, 100, 50, 100]  # what the pole leaves
    assert objects[0]["area"] == 50 * 100
    assert len(source) == 1
    with pytest.raises(SystemExit, match="must hold 2 images, found 1"):
        city.prepare(tmp_path / "city", tmp_path / "other", {"val": 2})


def test_the_swin_of_the_protocol_has_the_published_number_of_parameters(scripts):
    assert sys.modules["evidence_models"] is scripts["evidence_models"]
    with torch.device("meta"):
        model = scripts["evidence_models"].swin_spt_lsa(num_classes=200)
    assert sum(p.numel() for p in model.parameters()) == 7_149_794
