"""Settings without effect are refused when they are given, and accepted in stored recipes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pale.cli.main import main
from pale.core.settings import dotted_names
from pale.predict.bundle import load
from pale.recipes import RECIPES, get
from pale.recipes.effects import ALWAYS_CHECKED, find_inactive, setting_names
from pale.recipes.files import parse_recipe
from pale.recipes.kinds import KINDS
from pale.weights.read import load_weights
from pale.weights.write import save_weights

IMAGENET, ADE20K, COCO = "imagenet.pale_t", "ade20k.upernet_pale_t", "coco.mask_rcnn_pale_t"
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (IMAGENET, {"augment.colour_jitter": 0.4}),
    (IMAGENET, {"augment.auto": None, "augment.force_colour_jitter": True}),
    (IMAGENET, {"mix.probability": 0, "mix.mixup": 0.2}),
    (IMAGENET, {"mix.cutmix": 0, "mix.switch": 0.7}),
    (IMAGENET, {"mix.mixup": 0, "mix.cutmix": 0, "mix.probability": 0.5}),
    (IMAGENET, {"token_labels.weight": 1.0}),
    (IMAGENET, {"data.samples": 100}),
    (IMAGENET, {"data.hold_out": 0.1, "data.val": "test"}),
    (IMAGENET, {"model.new_head": True}),
    (IMAGENET, {"optim.steps_at": [3, 4]}),
    (IMAGENET, {"optim.scale_lr": False, "optim.lr_batch": 256}),
    (IMAGENET, {"warmup_epochs": 0, "optim.warmup_lr": 1e-4}),
    (IMAGENET, {"steps": 100, "warmup_steps": 10, "epochs": 300}),
    (ADE20K, {"epochs": 10}),
    (ADE20K, {"warmup_epochs": 1}),
    (ADE20K, {"loss.ohem_keep": 5}),
    (ADE20K, {"model.auxiliary": 0, "loss.auxiliary": 0.2}),
    (ADE20K, {"test.window": 700}),
    (ADE20K, {"multi": {"mode": "whole", "stride": 100}}),
    (ADE20K, {"data.objects": [1, 2]}),
    (COCO, {"optim.min_lr": 1e-6}),
    (COCO, {"model.heads": {"masks": False, "mask_width": 64}}),
    (COCO, {"data.size": 64}),
    ("quickstart", {"data.root": "photos"}),
    ("quickstart.segmentation", {"data.reduce_zero": True}),
    ("quickstart.detection", {"data.limit": 5}),
]


@pytest.mark.parametrize(("name", "changes"), REFUSED, ids=[f"{n} {c}" for n, c in REFUSED])
def test_a_setting_without_effect_is_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"has no effect .*; .*(set|remove)"):
        get(name).changed(changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (IMAGENET, {"augment.auto": None, "augment.colour_jitter": 0.2}),
        (IMAGENET, {"augment.colour_jitter": 0.4, "augment.force_colour_jitter": True}),
        (IMAGENET, {"mix.mixup": 0, "mix.cutmix": 0}),
        (IMAGENET, {"model.weights": None, "model.new_head": False}),
        (ADE20K, {"steps": None, "warmup_steps": None, "epochs": 100, "warmup_epochs": 1}),
        (ADE20K, {"test.mode": "slide", "test.window": 256, "test.stride": 200}),
        (COCO, {"optim.schedule": "cosine", "optim.min_lr": 1e-6}),
        ("quickstart", {"data.kind": "folder", "data.root": "photos"}),
        ("imagenet.pale_t_star", {"token_labels.weight": 1.0}),
    ],
)
def test_a_setting_with_an_effect_is_accepted(name: str, changes: dict[str, Any]) -> None:
    get(name).changed(changes)


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_holds_a_setting_without_effect(name: str) -> None:
    recipe = get(name)
    every = [
        n
        for n in dotted_names(type(recipe))
        if n not in ALWAYS_CHECKED and n not in recipe.required
    ]
    if "model.weights" in recipe.required:
        every.remove("model.new_head")
    assert find_inactive(recipe, every) == []
    usual = type(recipe)()
    assert recipe.steps is None or recipe.epochs == usual.epochs
    assert recipe.warmup_steps is None or recipe.warmup_epochs == usual.warmup_epochs


@pytest.mark.parametrize("kind", KINDS)
def test_rules_are_about_settings_that_exist(kind: str) -> None:
    known = set(dotted_names(KINDS[kind]))
    assert {name for rule in KINDS[kind].inactive_rules for name in rule.names} <= known


def test_a_whole_part_counts_as_its_settings() -> None:
    changes = {"optim": {"lr": 1, "betas": [0, 1]}, "batch": 2, "model.options": {"depths": [1]}}
    assert list(setting_names(changes)) == ["optim.lr", "optim.betas", "batch", "model.options"]


def test_the_message_names_what_to_set_instead(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--data.root", "photos"]) == 1
    assert "data.root has no effect while data.kind is scenes" in capsys.readouterr().err


@pytest.mark.parametrize("name", [ADE20K, COCO])
def test_the_size_of_real_images_is_set_by_other_settings(name: str) -> None:
    with pytest.raises(ValueError, match=r"data\.size has no effect") as error:
        get(name).changed({"data.size": 224})
    named = re.findall(r"(?:augment|test|multi)\.\w+", str(error.value))
    assert len(named) == 4
    assert set(named) <= set(dotted_names(type(get(name))))


def test_a_stored_recipe_with_settings_without_effect_is_read() -> None:
    """As in every recipe.yaml before colour jitter was refused together with RandAugment."""
    values = get(IMAGENET).plain()
    values["augment"]["colour_jitter"] = 0.4
    values |= {"steps": 100, "warmup_steps": 10}
    recipe = parse_recipe(yaml.safe_load(yaml.safe_dump(values)), "recipe.yaml")
    assert recipe.augment.colour_jitter == 0.4  # type: ignore[attr-defined]
    recipe.changed({"model.weights": None, "model.new_head": False, "batch": 512})


def test_earlier_weights_with_such_a_setting_are_loaded(tmp_path: Path) -> None:
    found = load_weights(Path("classify_pets"))
    recipe = found.about["recipe"]
    recipe["augment"] |= {"colour_jitter": 0.4, "auto": "rand-m9-mstd0.5-inc1"}
    path = tmp_path / "before.safetensors"
    save_weights(path, found.tensors, {"recipe": recipe, "classes": found.about["classes"]})
    assert len(load(path).classes) == 37


def test_colour_jitter_is_on_exactly_where_documented() -> None:
    from pale.data.transforms.images import Augment, train_transform

    def jitters(**settings: Any) -> bool:
        steps = train_transform(32, Augment(**settings)).colour.transforms
        return any(type(step).__name__ == "ColorJitter" for step in steps)

    assert not jitters()
    assert jitters(auto=None)
    assert jitters(force_colour_jitter=True)
    assert not jitters(auto=None, colour_jitter=0)
