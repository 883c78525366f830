"""Cityscapes at 512x256 for `pale train`: images, masks of 19 classes, and instances of 8 classes in COCO's format.

Labels are drawn from the polygons as cityscapesScripts does (createTrainIdLabelImgs and createTrainIdInstanceImgs), at
full size, and every fourth pixel of every fourth row is taken: copies of the masks at a reduced size were resampled by
unknown methods. Objects in groups are crowd regions, as in the benchmark, which ignores them.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from pale.data import rle

SIZE = (512, 256)  # width, height
# The 19 classes that are evaluated, in the order of their train ids, with their usual colours.
CLASSES = {
    "road": (128, 64, 128),
    "sidewalk": (244, 35, 232),
    "building": (70, 70, 70),
    "wall": (102, 102, 156),
    "fence": (190, 153, 153),
    "pole": (153, 153, 153),
    "traffic light": (250, 170, 30),
    "traffic sign": (220, 220, 0),
    "vegetation": (107, 142, 35),
    "terrain": (152, 251, 152),
    "sky": (70, 130, 180),
    "person": (220, 20, 60),
    "rider": (255, 0, 0),
    "car": (0, 0, 142),
    "truck": (0, 0, 70),
    "bus": (0, 60, 100),
    "train": (0, 80, 100),
    "motorcycle": (0, 0, 230),
    "bicycle": (119, 11, 32),
}
THINGS = tuple(CLASSES)[11:]  # with instances
IGNORED = 255
COUNTS = {"train": 2975, "val": 500}
# Labels that cityscapesScripts does not draw at all (id -1).
NOT_DRAWN = ("license plate",)


def prepare(
    data: Path, root: Path, counts: dict[str, int] = COUNTS, most: dict[str, int] | None = None
) -> None:
    """Write images/, masks/, classes.txt and instances_{train,val}.json below `root`, unless that was done before.

    Args:
        data: folder with leftImg8bit/ and gtFine/.
        root: folder to write.
        counts: images that each split must have.
        most: images of each split to write; None: all.
    """
    if (root / "complete").exists():
        return
    root.mkdir(parents=True, exist_ok=True)
    lines = [f"{i} {name} {r} {g} {b}" for i, (name, (r, g, b)) in enumerate(CLASSES.items())]
    (root / "classes.txt").write_text("\n".join(lines) + "\n")
    for split, count in counts.items():
        files = sorted((data / "leftImg8bit" / split).glob("*/*_leftImg8bit.png"))
        if len(files) != count:
            raise SystemExit(
                f"{data}/leftImg8bit/{split} must hold {count} images, found {len(files)}"
            )
        if most:  # from all cities
            files = files[:: max(1, len(files) // most[split])][: most[split]]
        for folder in ("images", "masks"):
            (root / folder / split).mkdir(parents=True, exist_ok=True)
        jobs = [(path, data, root, split) for path in files]
        with ProcessPoolExecutor() as pool:
            objects = list(pool.map(_convert, jobs, chunksize=16))
        content = _annotations([path.stem.removesuffix("_leftImg8bit") for path in files], objects)
        (root / f"instances_{split}.json").write_text(json.dumps(content))
    (root / "complete").touch()


def draw_labels(polygons: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, list[dict[str, Any]]]:
    """Return train ids and instance numbers at full size, and the class and crowd flag of each number, from 1 on."""
    size = (polygons["imgWidth"], polygons["imgHeight"])
    classes, instances = Image.new("L", size, IGNORED), Image.new("I", size, 0)
    draw_class, draw_instance = ImageDraw.Draw(classes), ImageDraw.Draw(instances)
    names, found = list(CLASSES), []
    for entry in polygons["objects"]:
        label, points = entry["label"], [tuple(point) for point in entry["polygon"]]
        group = label not in CLASSES and label.removesuffix("group") in CLASSES
        name = label.removesuffix("group") if group else label
        if entry.get("deleted") or name in NOT_DRAWN or len(points) < 2:
            continue
        draw_class.polygon(points, fill=names.index(name) if name in CLASSES else IGNORED)
        number = 0
        if name in THINGS:
            found.append({"category_id": THINGS.index(name) + 1, "iscrowd": int(group)})
            number = len(found)
        draw_instance.polygon(points, fill=number)
    return np.asarray(classes), np.asarray(instances), found


def _convert(job: tuple[Path, Path, Path, str]) -> list[dict[str, Any]]:
    """Write an image and its mask; return its objects."""
    path, data, root, split = job
    stem = path.stem.removesuffix("_leftImg8bit")
    with Image.open(path, formats=["PNG"]) as image:
        image = image.convert("RGB")
        if image.size != SIZE:
            image = image.resize(SIZE, Image.Resampling.LANCZOS)
        image.save(root / "images" / split / f"{stem}.jpg", quality=95)
    label = data / "gtFine" / split / path.parent.name / f"{stem}_gtFine_polygons.json"
    classes, instances, found = draw_labels(json.loads(label.read_text()))
    step = classes.shape[0] // SIZE[1]
    if classes.shape != (SIZE[1] * step, SIZE[0] * step):
        raise ValueError(f"{label}: polygons of {classes.shape[1]}x{classes.shape[0]} pixels")
    classes, instances = (
        each[step // 2 :: step, step // 2 :: step] for each in (classes, instances)
    )
    Image.fromarray(classes).save(root / "masks" / split / f"{stem}.png")
    tool, objects = rle.codec(), []
    for number, entry in enumerate(found, 1):
        mask = instances == number
        if mask.any():
            code = tool.encode(np.asfortranarray(mask.astype(np.uint8)))
            counts = code["counts"]
            ys, xs = np.nonzero(mask)
            objects.append(
                entry
                | {
                    "area": int(mask.sum()),
                    "bbox": [
                        int(xs.min()),
                        int(ys.min()),
                        int(np.ptp(xs)) + 1,
                        int(np.ptp(ys)) + 1,
                    ],
                    "segmentation": {
                        "size": list(mask.shape),
                        "counts": counts.decode() if isinstance(counts, bytes) else counts,
                    },
                }
            )
    return objects


def _annotations(names: list[str], objects: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the content of an annotation file in COCO's format."""
    images = [
        {"id": i, "file_name": f"{name}.jpg", "width": SIZE[0], "height": SIZE[1]}
        for i, name in enumerate(names, 1)
    ]
    listed = [entry | {"image_id": i} for i, each in enumerate(objects, 1) for entry in each]
    return {
        "images": images,
        "annotations": [entry | {"id": i} for i, entry in enumerate(listed, 1)],
        "categories": [{"id": i, "name": name} for i, name in enumerate(THINGS, 1)],
    }
