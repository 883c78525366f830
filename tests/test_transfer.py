"""Transfer: planned runs, settings chosen without test images, results and tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from support.scripts import TRANSFER, import_scripts

import pale
from pale.core.settings import vary
from pale.train.optim import make_optimizer
from pale.weights.write import save_weights


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    return import_scripts(monkeypatch, *TRANSFER)


def contenders(scripts: dict[str, ModuleType]) -> list[Any]:
    make = scripts["transfer_plan"].Contender
    names = ("pale_nano", "pale_tiny", "swin_tiny_patch4_window7_224")
    return [make(name, name, Path(f"{name}.safetensors"), "0" * 64) for name in names]


def write_trials(plan: ModuleType, folder: Path, scores: dict[str, list[float]]) -> None:
    """Write results of all trials of some models, with the given scores for the settings of each start."""
    folder.mkdir(exist_ok=True)
    for part in plan.PHOTO_SETS:
        for start, settings in plan.SETTINGS.items():
            for model, values in scores.items():
                for setting, last in zip(settings, values, strict=True):
                    row = {"set": part, "start": start, "model": model, "setting": setting}
                    name = f"trials-{part}-{model}-{start}-{setting}-0.json"
                    (folder / name).write_text(json.dumps(row | {"last": last, "method": "trial"}))


def test_every_planned_run_has_a_name_of_its_own_and_a_model_that_can_be_built(scripts, tmp_path):
    plan, names = scripts["transfer_plan"], scripts["transfer_data"].NAMES
    write_trials(plan, tmp_path, {"pale_nano": [1, 2, 3]})
    models = contenders(scripts)
    runs = plan.trials(Path("data"), names, models, 192)
    assert len(runs) == 5 * 3 * 2 * 3
    runs += plan.runs(Path("data"), tmp_path, names, models, 3, 192)
    assert len({run.name for run in runs}) == len(runs) == 90 + 8 * 3 * 2 * 3
    built: dict[str, Any] = {}
    for run in runs:
        recipe = run.recipe
        key = json.dumps([recipe.kind, recipe.model.plain()])
        if key not in built:
            size = recipe.data.size if recipe.kind == "classification" else 64
            with torch.device("meta"):
                built[key] = recipe.model.build(9, size)
        assert (run.init is not None) == (run.about["start"] == "weights")
    assert len(built) == 3 * 4
    for run in runs[:90]:
        key = json.dumps([run.recipe.kind, run.recipe.model.plain()])
        assert make_optimizer(built[key], run.recipe).param_groups


def test_settings_are_the_same_for_every_model_and_chosen_without_test_images(scripts, tmp_path):
    plan, names = scripts["transfer_plan"], scripts["transfer_data"].NAMES
    models = contenders(scripts)
    for run in plan.trials(Path("data"), names, models, 192):
        assert (run.recipe.data.hold_out, run.recipe.data.train) == (0.2, "train")
    scores = {"pale_nano": [50, 60, 40], "pale_tiny": [90, 70, 40]}  # the mean prefers the first
    write_trials(plan, tmp_path, scores)
    runs = plan.runs(Path("data"), tmp_path, plan.PHOTO_SETS, models, 2, 192)
    assert {(run.about["start"], run.about["setting"]) for run in runs} == {
        ("scratch", "muon"),
        ("weights", "adamw"),
    }
    assert all(run.recipe.data.hold_out == 0 for run in runs)
    same = {"name": "pale_nano", "options": {}, "drop_path": 0.0}
    plain = [vary(run.recipe, model=same, seed=0).plain() for run in runs]
    assert len({json.dumps(each, default=str) for each in plain}) == 5 * 2  # sets and starts


def test_a_chosen_setting_stays_and_incomplete_trials_are_refused(scripts, tmp_path):
    plan = scripts["transfer_plan"]
    with pytest.raises(SystemExit, match="no model with all trials of cub-200 from weights"):
        plan.chosen_setting(tmp_path, "cub-200", "weights")
    write_trials(plan, tmp_path, {"pale_nano": [1, 2, 3]})
    assert plan.chosen_setting(tmp_path, "cub-200", "weights") == "muon"
    row = {"set": "cub-200", "start": "weights", "method": "fine-tuned", "setting": "adamw-low"}
    (tmp_path / "cub-200-pale_nano-weights-0.json").write_text(json.dumps(row))
    assert plan.chosen_setting(tmp_path, "cub-200", "weights") == "adamw-low"
    assert plan.chosen_setting(tmp_path, "cub-200", "scratch") == "adamw"


def test_a_setting_that_was_fixed_beforehand_needs_no_trials_and_is_marked(scripts, tmp_path):
    plan, transfer = scripts["transfer_plan"], scripts["transfer"]
    fixed = dict([transfer.parse_setting("weights=adamw"), transfer.parse_setting("scratch=muon")])
    runs = plan.runs(Path("data"), tmp_path, plan.PHOTO_SETS, contenders(scripts), 1, 192, fixed)
    assert {(r.about["start"], r.about["setting"], r.about["fixed"]) for r in runs} == {
        ("scratch", "muon", True),
        ("weights", "adamw", True),
    }
    lines = transfer._describe_settings([run.about for run in runs])
    assert lines == ["Settings, fixed beforehand: scratch muon, weights adamw."]
    with pytest.raises(argparse.ArgumentTypeError, match="got 'weights=sgd'"):
        transfer.parse_setting("weights=sgd")


def test_dense_sets_are_tested_on_images_that_were_not_trained_on(scripts):
    plan = scripts["transfer_plan"]
    splits = {"camvid": ("train", "test"), "coco-mini": ("train2017", "val2017")}
    splits["coco-10k"] = splits["coco-mini"]
    for part, expected in splits.items():
        for name in ("pale_nano", "pale_tiny", "swin_tiny_patch4_window7_224"):
            recipe = plan.dense(Path("data"), part, name)
            assert (recipe.data.train, recipe.data.val) == expected
            assert recipe.model.name == name
    assert not recipe.model.heads.masks
    assert plan.dense(Path("data"), "coco-mini", "pale_tiny").model.heads.masks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pale_nano", ("pale_nano", "pale_nano", None)),
        ("pale_nano=runs/a=b", ("pale_nano", "pale_nano", Path("runs/a=b"))),
        ("no_dogs:pale_nano=runs/a", ("no_dogs", "pale_nano", Path("runs/a"))),
    ],
)
def test_models_are_given_by_label_architecture_and_weights(scripts, text, expected):
    found = scripts["transfer"].parse_model(text)
    assert (found.label, found.name, found.weights) == expected
    assert found.starts == (("scratch",) if found.weights is None else ("scratch", "weights"))
    with pytest.raises(argparse.ArgumentTypeError, match="a label of letters"):
        scripts["transfer"].parse_model("a/b:pale_nano")


def write_result(folder: Path, model: str, start: str, seed: int, last: float, **more: Any) -> None:
    row = {
        "part": "cub-200",
        "label": f"{model}-{start}-{more.get('method', '')}",
        "seed": seed,
        "set": "cub-200",
        "model": model,
        "architecture": model,
        "start": start,
        "method": "fine-tuned",
        "setting": "muon",
        "weights": "0" * 64 if start == "weights" else None,
        "size": 192,
        "metric": "top1",
        "last": last,
        "figures": {"top1": last},
        "environment": {"device": "cpu", "torch": "2", "commit": "abcdef0123456"},
    }
    folder.mkdir(exist_ok=True)
    row |= more
    name = f"{row['part']}-{row['label']}-{seed}.json"
    (folder / name).write_text(json.dumps(row))


def test_tables_merge_folders_and_show_intervals_and_differences(scripts, tmp_path, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    for seed, (scratch, weights) in enumerate([(50, 80), (52, 81), (54, 82)]):
        write_result(a, "pale_tiny", "scratch", seed, scratch)
        write_result(b, "pale_tiny", "weights", seed, weights)
        write_result(b, "swin", "weights", seed, 70 + seed)
    figures = {"linear": 60.0, "neighbours": 40.0}
    write_result(a, "swin", "weights", 0, 60, method="frozen", figures=figures, setting=None)
    write_result(a, "swin", "weights", 1, 99, method="trial")
    args = argparse.Namespace(
        results=[a, b], output=tmp_path / "out.md", compare=["pale_tiny", "swin"]
    )
    scripts["transfer"].tables(args)
    text = (tmp_path / "out.md").read_text()
    assert text == capsys.readouterr().out
    # 4.303 * 2 / sqrt(3), 4.303 * 1 / sqrt(3); differences 30, 29, 28
    line = "| pale_tiny | fine-tuned, top1 | 52.00 ± 4.97 | 81.00 ± 2.48 | +29.00 ± 2.48 | 3, 3 |"
    assert line in text
    assert "| swin | 20 nearest neighbours |  | 40.00 |  | 0, 1 |" in text
    assert "| swin | linear probe |  | 60.00 |  | 0, 1 |" in text
    assert "| cub-200 | 81.00 ± 2.48 | 71.00 ± 2.48 | +10.00 ± 0.00 |" in text
    assert "pale_tiny has the higher mean on 1 of 1 sets." in text
    assert "99" not in text


def test_a_difference_has_an_interval_only_over_the_same_seeds(scripts):
    difference = scripts["transfer"].difference
    assert difference({0: 60.0}, {0: 50.0, 1: 52.0}) == "+9.00"
    assert difference({0: 60.0, 1: 61.0}, {0: 50.0, 1: 52.0}) == "+9.50 ± 6.35"
    assert difference({0: 60.0}, {}) == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "1" * 64}, "of other weights"),
        ({"name": "pale_tiny"}, "another architecture"),
        ({}, "of image size 192, not 160"),
    ],
)
def test_results_of_other_weights_or_sizes_are_not_mixed(scripts, tmp_path, change, message):
    transfer, plan = scripts["transfer"], scripts["transfer_plan"]
    write_result(tmp_path, "pale_nano", "weights", 0, 60)
    model = plan.Contender("pale_nano", "pale_nano", Path("a"), "0" * 64)
    transfer.require_same(tmp_path, [model], 192)
    with pytest.raises(SystemExit, match=message):
        transfer.require_same(tmp_path, [replace(model, **change)], 192 if change else 160)


def test_frozen_features_are_scored_for_photos_and_repeated_only_from_scratch(scripts):
    models = contenders(scripts)[:1]
    jobs = scripts["transfer"].frozen(scripts["transfer_data"].NAMES, models, 3)
    assert Counter(start for _, _, start, _ in jobs) == {"scratch": 5 * 3, "weights": 5}


TINY = {"depths": [1, 1, 1, 1], "channels": [8, 8, 16, 16], "heads": [2, 2, 2, 2]}


@pytest.mark.slow
def test_from_weights_to_tables_on_a_cpu(scripts, tmp_path, monkeypatch, capsys):
    transfer, plan = scripts["transfer"], scripts["transfer_plan"]
    photos = plan.photos

    def small(*words: Any) -> Any:
        changes = {"batch": 4, "epochs": 1, "min_steps": 2, "warmup_steps": 0, "log_every": 1}
        return vary(photos(*words), model={"options": TINY}, **changes)

    for module in (transfer, plan):
        monkeypatch.setattr(module, "photos", small)
    monkeypatch.setattr(transfer, "NEIGHBOURS", 3)
    monkeypatch.setattr(plan, "TRIAL_LENGTH", {"epochs": 1, "min_steps": 2})
    for settings in plan.SETTINGS.values():  # one trial for each start
        for name in list(settings)[1:]:
            monkeypatch.delitem(settings, name)
    root = tmp_path / "data/cub-200"
    for split in ("train", "test"):
        for colour, label in ((40, "dark"), (200, "bright")):
            (root / split / label).mkdir(parents=True)
            for i in range(6):
                image = Image.new("RGB", (40, 40), (colour + i, colour, colour))
                image.save(root / split / label / f"{i}.jpg")
    (root / "manifest.json").write_text("{}")
    weights = tmp_path / "w.safetensors"
    made = pale.create_model("pale_nano", num_classes=7, **TINY)
    save_weights(weights, made.state_dict(), {})
    words = ["run", str(tmp_path / "data"), str(tmp_path / "out"), "--sets", "cub-200"]
    words += ["--models", f"tiny:pale_nano={weights}", "--seeds", "1", "--size", "32"]
    words += ["--workers", "0", "--graph", "false"]
    monkeypatch.setattr(sys, "argv", ["transfer.py", *words])
    transfer.main()
    results = tmp_path / "out/results"
    names = sorted(path.stem for path in results.glob("cub-*.json"))
    starts = ("scratch", "weights")
    assert names == [
        *(f"cub-200-tiny-frozen-{start}-0" for start in starts),
        *(f"cub-200-tiny-{start}-0" for start in starts),
    ]
    assert len(list(results.glob("trials-*.json"))) == 2
    row = json.loads((results / "cub-200-tiny-weights-0.json").read_text())
    assert row["recipe"]["model"]["weights"] == str(weights)
    assert row["recipe"]["model"]["new_head"] is True
    assert len(row["weights"]) == 64
    assert {"torch", "commit", "device"} <= row["environment"].keys()
    assert "--models" in row["command"]
    frozen = json.loads((results / "cub-200-tiny-frozen-weights-0.json").read_text())
    assert frozen["images"] == {"train": 12, "test": 12}
    assert frozen["figures"]["linear"] == 100  # dark and bright
    assert frozen["command"] == row["command"]
    # What is done is not repeated.
    times = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    transfer.main()
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == times
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["transfer.py", "tables", str(results)])
    transfer.main()
    text = capsys.readouterr().out
    assert "| tiny | linear probe | " in text
    assert "| tiny | fine-tuned, top1 | " in text
    assert "| 1, 1 |" in text


def test_sets_that_are_not_prepared_are_named(scripts, tmp_path, monkeypatch):
    words = ["run", str(tmp_path), str(tmp_path), "--models", "pale_nano", "--sets", "camvid"]
    monkeypatch.setattr(sys, "argv", ["transfer.py", *words])
    with pytest.raises(SystemExit, match="lacks camvid; run prepare, or name --sets"):
        scripts["transfer"].main()
