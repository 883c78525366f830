"""The program that makes the included weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.scripts import import_scripts


def test_the_effect_of_packing_is_measured_on_test_photos(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = import_scripts(monkeypatch, "common", "demo_weights")["demo_weights"]
    names = ["Abyssinian_1", "pug_2"]
    (tmp_path / "images").mkdir()
    (tmp_path / "annotations").mkdir()
    lines = ["# name class species breed", *(f"{name} 1 1 1" for name in names)]
    (tmp_path / "annotations/test.txt").write_text("\n".join(lines))
    for seed, name in enumerate(names):
        pixels = np.random.default_rng(seed).integers(0, 256, (50, 60, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/{name}.jpg")
    weights = made["classification"]
    assert script.effect(weights, weights, tmp_path) == {
        "photos": 2,
        "logit_error": 0,
        "same_class": 100,
    }
