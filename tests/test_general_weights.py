"""General-purpose weights: packed, measured by source, with a card and an entry that the package accepts."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.mixtures import SOURCES, mixture_recipe, write_mixture
from support.scripts import import_scripts

from pale.predict.bundle import load
from pale.recipes import get
from pale.train.distributed import World
from pale.train.loop import train
from pale.weights import zoo


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    names = "pretraining_sources", "planned_runs", "general_weights"
    return import_scripts(monkeypatch, *names)["general_weights"]


@pytest.mark.slow
def test_a_run_becomes_an_entry_with_figures_of_every_source(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_mixture(tmp_path / "data")
    source = script.SOURCES[0]
    known = []
    for each in SOURCES:
        name = str(each["name"])
        (data / name / "manifest.json").write_text(json.dumps({"classes": ["a", "b"]}))
        known.append(type(source)(name, "owner/name", "0" * 40, terms=f"terms of {name}"))
    monkeypatch.setattr(script, "SOURCES", tuple(known))
    recipe = mixture_recipe(data, name="pretrain.pale_nano")
    train(recipe, tmp_path / "run", World(torch.device("cpu")), quiet=True)
    out = tmp_path / "out"
    script.main([str(tmp_path / "run"), str(data), str(out)])

    assert [check for check in zoo.verify_files(out) if check.problem] == []
    (entry,) = zoo.list_entries(out)
    assert (entry.name, entry.license) == ("general_nano", "cc-by-nc-4.0")
    assert entry.timm["default"] is True
    assert entry.timm["label_names"] == list(load(out / entry.file).classes)
    row = json.loads((out / "general_nano.json").read_text())
    # Packing changes single images of the few at most.
    assert row["packed"].keys() == row["before_packing"].keys()
    assert {"folder.top1", "shards.top1", "tags.map"} <= entry.figures.keys()
    card = (out / entry.card).read_text()
    assert entry.sha256 in card
    for each in known:
        metric = "map" if each.name == "tags" else "top1"
        figure = f"{entry.figures[f'{each.name}.{metric}']:.2f}"
        assert any(
            line.startswith(f"| {each.name} |") and figure in line and each.terms in line
            for line in card.splitlines()
        )
    assert entry.command.startswith("pale train pretrain.pale_nano --data.root DATA --data.mix @")
    assert "--batch 6" in entry.command
    assert f"`{entry.command}`" in card
    assert str(tmp_path) not in card


def test_continued_weights_name_the_file_that_they_start_from(script: ModuleType) -> None:
    recipe = get("pretrain.pale_nano")
    assert script.describe_start(recipe) is None
    assert "--init" not in script.training_command(recipe)
    continued = recipe.started_from(Path("general_nano"))
    entry = zoo.get_entry("general_nano")
    found = script.describe_start(continued)
    assert found == {"name": entry.name, "sha256": entry.sha256, "command": entry.command}
    # Not the name: it will be that of the new weights.
    assert "--init START --data.root DATA" in script.training_command(continued)


def test_a_run_on_one_dataset_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"must be a classifier trained with --data\.mix"):
        script.main(["classify_pets", str(tmp_path), str(tmp_path / "out")])
