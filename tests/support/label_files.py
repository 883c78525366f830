"""Small datasets in the formats of YOLO and Pascal VOC, drawn scenes with their objects, written by hand."""

from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from PIL import Image
from support.recipes import detection_recipe, dotted, segmentation_recipe

from pale.data.outlines import join_outlines, outlines
from pale.data.sources.class_list import palette
from pale.data.sources.scenes import CLASSES, Scenes
from pale.recipes.kinds import Detection, Segmentation

SPLITS = {"train": (0, 6), "val": (1, 3)}  # seed and number of images
SIZE = 48


def scenes(split: str) -> Scenes:
    seed, count = SPLITS[split]
    return Scenes(count, SIZE, seed, (1, 3))


def write_yolo(root: Path, polygons: bool = True) -> Path:
    """Write images/{train,val}, labels/{train,val} and data.yaml."""
    for split in SPLITS:
        for part in ("images", "labels"):
            (root / part / split).mkdir(parents=True)
        for i, scene in enumerate(scenes(split)):
            Image.fromarray(scene.image).save(root / "images" / split / f"{i}.png")
            lines = []
            for k, label in enumerate(scene.labels):
                mask = scene.instances == k + 1
                if not mask.any():
                    continue
                points = join_outlines(outlines(mask)) / SIZE
                if not polygons:
                    low, high = points.min(0), points.max(0)
                    points = np.concatenate([(low + high) / 2, high - low])
                lines.append(" ".join([str(label), *(f"{v:.6f}" for v in points.ravel())]))
            (root / "labels" / split / f"{i}.txt").write_text("\n".join(lines) + "\n")
    names = "".join(f"  {i}: {name}\n" for i, name in enumerate(CLASSES))
    (root / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames:\n{names}")
    return root


def voc_object(name: str, box, difficult: int = 0) -> str:
    left, top, right, bottom = box
    return (
        f"<object><name>{escape(name)}</name><pose>Unspecified</pose><truncated>0</truncated>"
        f"<difficult>{difficult}</difficult><bndbox><xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax>"
        f"<ymax>{bottom}</ymax></bndbox></object>"
    )


def voc_xml(objects: str, size=(SIZE, SIZE), name: str = "0.png") -> str:
    sides = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return f"<annotation><filename>{name}</filename>{sides}{objects}</annotation>"


def save_palette(values: np.ndarray, path: Path) -> None:
    """Write an image with VOC's palette."""
    image = Image.fromarray(values.astype(np.uint8), "P")
    image.putpalette([v for colour in [(0, 0, 0), *palette(255)] for v in colour])
    image.save(path)


def write_voc(root: Path) -> Path:
    """Write JPEGImages, Annotations, SegmentationClass, SegmentationObject, ImageSets and labelmap.txt."""
    parts = ("JPEGImages", "Annotations", "SegmentationClass", "SegmentationObject")
    for folder in (*parts, "ImageSets/Main", "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True)
    for split in SPLITS:
        names = []
        for i, scene in enumerate(scenes(split)):
            name = f"{split}_{i}"
            names.append(name)
            Image.fromarray(scene.image).save(root / "JPEGImages" / f"{name}.png")
            objects, numbers, classes = "", np.zeros((SIZE, SIZE)), np.zeros((SIZE, SIZE))
            for label, mask in visible(scene):
                ys, xs = np.nonzero(mask)
                box = (xs.min() + 1, ys.min() + 1, xs.max() + 1, ys.max() + 1)
                objects += voc_object(CLASSES[label], box)
                numbers[mask], classes[mask] = objects.count("<object>"), label + 1
            (root / "Annotations" / f"{name}.xml").write_text(voc_xml(objects, name=f"{name}.png"))
            save_palette(numbers, root / "SegmentationObject" / f"{name}.png")
            save_palette(classes, root / "SegmentationClass" / f"{name}.png")
        for part in ("Main", "Segmentation"):
            (root / "ImageSets" / part / f"{split}.txt").write_text("\n".join(names) + "\n")
    colours = [(0, 0, 0), *palette(len(CLASSES))]
    lines = [
        f"{name}:{r},{g},{b}::"
        for name, (r, g, b) in zip(("background", *CLASSES), colours, strict=True)
    ]
    (root / "labelmap.txt").write_text("# label:color_rgb:parts:actions\n" + "\n".join(lines))
    return root


def visible(scene):
    """Yield class and mask of the objects of a scene that are not hidden."""
    for k, label in enumerate(scene.labels):
        mask = scene.instances == k + 1
        if mask.any():
            yield label, mask


def detection_on(kind: str, root: Path, **changes) -> Detection:
    """Return the small recipe on such a folder."""
    data = {"data.kind": kind, "data.root": str(root), "data.train": "train", "data.val": "val"}
    return detection_recipe().override(data | dotted(changes))


def segmentation_on(kind: str, root: Path, **changes) -> Segmentation:
    """Return the small recipe on such a folder."""
    data = {"data.kind": kind, "data.root": str(root), "data.train": "train", "data.val": "val"}
    return segmentation_recipe().override(data | dotted(changes))
