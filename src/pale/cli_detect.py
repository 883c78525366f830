"""The commands of detection: its part of eval, predict and data check, and data coco."""

from __future__ import annotations

import argparse
import json
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .cli_say import console, say, say_json, say_problems
from .cli_segment import mask_options
from .progress import shown

if TYPE_CHECKING:
    from .recipes.schema import Detection


def add_check(check: Any) -> None:
    """Options of `pale data check` for COCO's json."""
    objects = check.add_argument_group(
        "pictures with objects", "DIR holds COCO's json and folders of pictures (--images)."
    )
    objects.add_argument(
        "--annotations", metavar="FILE", help="COCO's json under the root, {split} in it"
    )


def add_convert(add: Any, kinds: Any) -> None:
    """Add `pale data coco`."""
    coco = add(kinds, "coco", _convert, "write COCO's json from pictures and instance masks")
    coco.add_argument("images", type=Path, metavar="IMAGES", help="folder of pictures")
    coco.add_argument(
        "masks",
        type=Path,
        metavar="MASKS",
        help="folder of masks: each value above 0 is an object",
    )
    coco.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the json to write"
    )
    coco.add_argument("--classes", nargs="+", default=["object"], help="their names")
    coco.add_argument(
        "--divisor",
        type=int,
        help="a value's class is value // divisor, from 1 on (Cityscapes: 1000)",
    )


def check(args: argparse.Namespace) -> int:
    """Check pictures and COCO's json."""
    from .data.instance_check import check_instances
    from .data.labelled import cores

    if others := [*mask_options(args), *(["--sheet"] if args.sheet else [])]:
        raise ValueError(
            f"{others[0]} says nothing about objects, which --annotations asks for; leave out one of them"
        )
    images = args.images or "{split}"
    splits = {}
    for split in args.splits:
        paths = [args.root / word.replace("{split}", split) for word in (args.annotations, images)]
        splits[split] = (paths[0], paths[1])
        if "{split}" not in args.annotations:
            break
    found = check_instances(splits, args.workers or cores(), shown(args.json))
    if args.json:
        say_json(found.plain())
        return 0 if found.good else 1
    table = Table("class", *(f"{s}: {w}" for s in found.splits for w in ("objects", "pictures")))
    for name in found.classes:
        entries = [split["classes"][name] for split in found.splits.values()]
        table.add_row(name, *(str(e[w]) for e in entries for w in ("objects", "images")))
    console().print(table)
    for name, split in found.splits.items():
        sizes = ", ".join(f"{n} {size}" for size, n in split["sizes"].items())
        say(
            f"{name}: {split['images']} pictures, {split['objects']} objects ({sizes}), "
            f"{split['crowds']} crowds, {split['empty']} pictures without objects"
        )
    say_problems(found)
    return 0 if found.good else 1


def evaluate(args: argparse.Namespace, recipe: Detection, weights: Any) -> None:
    """`pale eval` for a detector."""
    from .detect import evaluate, write_evaluation
    from .train.distributed import join

    with join(args.device) as world:
        track = shown(args.json, world.main)
        figures, metric = evaluate(recipe, weights, args.weights, world, track=track)
        if not world.main:
            return
    folder = args.output or (args.weights / "evaluation" if args.weights.is_dir() else None)
    if folder is not None:
        write_evaluation(figures, metric, recipe, folder)
    reported = recipe.reported.plain() if recipe.reported else {}
    if args.json:
        paper = {k: v for k, v in reported.items() if v is not None and "_ap" in k}
        plain = figures | {"paper": paper, "test": recipe.test.plain()}
        say_json(plain | {"per_class": metric.per_class()})
        return
    table = Table("", "AP", "AP50", "AP75", "small", "medium", "large", "AP in the paper")
    for kind in ("box", "mask") if metric.masks else ("box",):
        names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
        cells = [f"{figures[k]:.2f}" if (k := f"{kind}_{n}") in figures else "-" for n in names]
        theirs = reported.get(f"{kind}_ap")
        table.add_row(kind, *cells, "-" if theirs is None else f"{theirs:g}")
    console().print(table)
    rows = metric.per_class()
    columns = [c for c in rows[0] if c not in ("class", "objects")]
    table = Table("class", "objects", *(c.replace("_", " ") for c in columns))
    for row in rows:
        cells = ["-" if row[c] is None else f"{row[c]:.2f}" for c in columns]
        table.add_row(row["class"], str(row["objects"]), *cells)
    console().print(table)
    say(f"{figures['images']:.0f} images, {told(recipe)}")
    if folder is not None:
        say(f"{folder} written: evaluation.json, per_class.csv, detections_*.json (COCO's results)")


def told(recipe: Detection) -> str:
    """How objects were looked for, in words."""
    test = recipe.test
    size = "own size" if test.short is None else f"short side {test.short}"
    long = "" if test.long is None else f", long side at most {test.long}"
    return f"{size}{long}, scores from {test.score:g} on, at most {test.most} objects an image"


def _convert(args: argparse.Namespace) -> None:
    from .data.instances import convert

    skipped: Counter[int] = Counter()
    content = convert(
        args.images, args.masks, args.classes, args.divisor, shown(args.json), skipped
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(content))
    counts = {part: len(content[part]) for part in ("images", "annotations", "categories")}
    if args.json:
        say_json(counts | {"skipped": skipped}, None)
        return
    say(f"{args.output}: {counts['images']} pictures, {counts['annotations']} objects")
    if skipped:
        values = ", ".join(str(v) for v in sorted(skipped))
        say(
            f"{skipped.total()} regions below the divisor are no objects and left out: values {values}"
        )
    images, annotations = (shlex.quote(str(path)) for path in (args.images, args.output))
    say(
        f"train with: pale train small_boxes.mask_rcnn_pale_t --data.root . --data.images {images} "
        f"--data.annotations {annotations} --data.hold_out 0.2"
    )
