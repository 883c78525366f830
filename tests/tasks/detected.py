"""A detection recipe that makes a step in some ten milliseconds, and small COCO sets in files."""

import json
from pathlib import Path

from PIL import Image

from pale.data.instances import SceneInstances
from pale.data.scenes import CLASSES, Scenes
from pale.recipes import get
from pale.recipes.schema import Detection

CHANGES = {
    "model.options": {"depths": [1, 1, 1, 1], "channels": [8, 16, 16, 16], "heads": [2, 2, 2, 2]},
    "model.drop_path": 0.3,
    "model.heads.width": 16,
    "model.heads.box_width": 16,
    "model.heads.mask_width": 8,
    "model.heads.mask_layers": 1,
    "model.heads.proposals": 20,
    "model.heads.rpn_samples": 16,
    "model.heads.box_samples": 8,
    "data.size": 48,
    "data.samples": 22,
    "data.val_samples": 5,
    "data.objects": [1, 3],
    "data.shapes": list(CLASSES),
    "epochs": 3,
    "steps": 6,
    "warmup_steps": 2,
    "batch": 4,
    "log_every": 1,
}


def detected(**changes) -> Detection:
    """The recipe, with settings changed by dotted name; "." is written "__"."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return get("quickstart.detection").override(CHANGES | changes)


def coco_json(seed: int, count: int, size: int = 48, gaps: int = 3) -> dict:
    """COCO's json of scenes; category ids have gaps."""
    source = SceneInstances(Scenes(count, size, seed, (1, 3)))
    numbers = [gaps * i + 2 for i in range(len(CLASSES))]
    content = {
        "images": [
            {"id": 100 + i, "file_name": f"{i}.png", "height": size, "width": size}
            for i in range(count)
        ],
        "categories": [{"id": n, "name": c} for n, c in zip(numbers, CLASSES, strict=True)],
        "annotations": [],
    }
    for i in range(count):
        for entry in source.instances(i).annotations(100 + i, numbers):
            content["annotations"].append({"id": len(content["annotations"]) + 1} | entry)
    return content


def write_coco(root: Path, counts=(6, 3), size: int = 48, change=None) -> Path:
    """train/, val/ and annotations/{train,val}.json; `change(split, content)` may spoil the json."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(zip(("train", "val"), counts, strict=True)):
        (root / split).mkdir(exist_ok=True)
        scenes = Scenes(count, size, seed, (1, 3))
        for i in range(count):
            Image.fromarray(scenes[i].image).save(root / split / f"{i}.png")
        content = coco_json(seed, count, size)
        if change is not None:
            change(split, content)
        (root / "annotations" / f"{split}.json").write_text(json.dumps(content))
    return root


def own_objects(root: Path, **changes) -> Detection:
    """The small recipe on such a folder."""
    data = {
        "data.kind": "coco",
        "data.root": str(root),
        "data.images": "{split}",
        "data.annotations": "annotations/{split}.json",
        "data.train": "train",
        "data.val": "val",
    }
    return detected().override(
        data | {name.replace("__", "."): value for name, value in changes.items()}
    )
