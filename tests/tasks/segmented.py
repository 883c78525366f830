"""A segmentation recipe that makes a step in some ten milliseconds, with everything on; and folders of masks."""

from pathlib import Path

import numpy as np
from PIL import Image

from pale.data.scenes import draw
from pale.recipes import get
from pale.recipes.schema import Segmentation

CHANGES = {
    "model.options": {"depths": [1, 1, 1, 1], "channels": [8, 16, 16, 16], "heads": [2, 2, 2, 2]},
    "model.drop_path": 0.3,
    "model.width": 12,
    "model.auxiliary": 6,
    "model.dropout": 0.1,
    "data.size": 32,
    "data.samples": 22,
    "data.val_samples": 5,
    "augment.crop": 32,
    "augment.scale": [0.5, 2.0],
    "augment.most_of_one_class": 0.75,
    "augment.distort": 1.0,
    "loss.class_weights": None,
    "steps": 6,
    "warmup_steps": 2,
    "batch": 8,
    "log_every": 1,
}


def segmented(**changes) -> Segmentation:
    """The recipe, with settings changed by dotted name; "." is written "__"."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return get("quickstart.segmentation").override(CHANGES | changes)


def write_masks(root: Path, counts=(4, 2), size: int = 32) -> Path:
    """images/{train,val}, masks/{train,val} and classes.txt; grey masks of scenes."""
    names = ("background", "disc", "ring", "square", "triangle", "cross", "star", "crescent", "bar")
    lines = [f"{i} {name} {20 * i} {255 - 20 * i} 7" for i, name in enumerate(names)]
    (root / "classes.txt").parent.mkdir(parents=True, exist_ok=True)
    (root / "classes.txt").write_text("\n".join(lines) + "\n")
    for seed, (split, count) in enumerate(zip(("train", "val"), counts, strict=True)):
        for folder in ("images", "masks"):
            (root / folder / split).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            scene = draw(seed, i, size)
            Image.fromarray(scene.image).save(root / "images" / split / f"{i}.png")
            Image.fromarray(scene.mask).save(root / "masks" / split / f"{i}.png")
    return root


def own_masks(root: Path, **changes) -> Segmentation:
    """The small recipe on such a folder."""
    data = {
        "data.kind": "folder",
        "data.root": str(root),
        "data.images": "images",
        "data.masks": "masks",
        "data.classes": "classes.txt",
    }
    return segmented().override(
        data | {name.replace("__", "."): value for name, value in changes.items()}
    )


def colours() -> np.ndarray:
    return np.array([[20 * i, 255 - 20 * i, 7] for i in range(9)], np.uint8)
