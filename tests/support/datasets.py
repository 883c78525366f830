"""Small datasets in files: class folders, masks and COCO annotations, with recipes that train on them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from support.recipes import detection_recipe, dotted, segmentation_recipe

from pale.data.sources.instances import SceneInstances
from pale.data.sources.scenes import CLASSES, Scenes, draw_scene
from pale.recipes.kinds import Detection, Segmentation


def write_image_folders(root: Path, *names: str) -> None:
    """Write train/ and val/, each with four images of each class; two classes by default."""
    for split in ("train", "val"):
        for name in names or ("a", "b"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (40, 40), (i * 60, 0, 90)).save(folder / f"{i}.png")


def write_masks(root: Path, counts=(4, 2), size: int = 32) -> Path:
    """Write images/{train,val}, masks/{train,val} and classes.txt, with grey masks of scenes."""
    names = ("background", "disc", "ring", "square", "triangle", "cross", "star", "crescent", "bar")
    lines = [f"{i} {name} {20 * i} {255 - 20 * i} 7" for i, name in enumerate(names)]
    (root / "classes.txt").parent.mkdir(parents=True, exist_ok=True)
    (root / "classes.txt").write_text("\n".join(lines) + "\n")
    for seed, (split, count) in enumerate(zip(("train", "val"), counts, strict=True)):
        for folder in ("images", "masks"):
            (root / folder / split).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            scene = draw_scene(seed, i, size)
            Image.fromarray(scene.image).save(root / "images" / split / f"{i}.png")
            Image.fromarray(scene.mask).save(root / "masks" / split / f"{i}.png")
    return root


def recipe_on_masks(root: Path, **changes) -> Segmentation:
    """Return the small recipe on such a folder."""
    data = {
        "data.kind": "folder",
        "data.root": str(root),
        "data.images": "images",
        "data.masks": "masks",
        "data.classes": "classes.txt",
    }
    return segmentation_recipe().override(data | dotted(changes))


def colours() -> np.ndarray:
    return np.array([[20 * i, 255 - 20 * i, 7] for i in range(9)], np.uint8)


def coco_json(seed: int, count: int, size: int = 48, gaps: int = 3) -> dict:
    """Return COCO annotations of scenes; category ids have gaps."""
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
    """Write train/, val/ and annotations/{train,val}.json; `change(split, content)` may edit the annotations."""
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


def recipe_on_coco(root: Path, **changes) -> Detection:
    """Return the small recipe on such a folder."""
    data = {
        "data.kind": "coco",
        "data.root": str(root),
        "data.images": "{split}",
        "data.annotations": "annotations/{split}.json",
        "data.train": "train",
        "data.val": "val",
    }
    return detection_recipe().override(data | dotted(changes))
