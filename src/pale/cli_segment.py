"""The commands of segmentation: its part of eval and of data check."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .cli_say import console, say, say_json, say_problems
from .progress import shown

if TYPE_CHECKING:
    from .recipes.schema import Segmentation


def add_check(check: Any) -> None:
    """Options of `pale data check` for images with masks."""
    check.add_argument("--recipe", help="masks: a segmentation recipe that says what lies where")
    check.add_argument(
        "--images", metavar="DIR", help="masks, objects: folder of pictures, under the root"
    )
    check.add_argument("--masks", metavar="DIR", help="masks: folder of masks, under the root")
    check.add_argument("--classes", metavar="FILE", help="masks: class list, under the root")
    check.add_argument("--ignore", type=int, nargs="+", help="masks: values that are no label")
    check.add_argument("--reduce-zero", action="store_true", help="masks: classes count from 1")


def wants_masks(args: argparse.Namespace) -> bool:
    """Whether `pale data check` is about masks."""
    return bool(args.recipe or args.images or args.masks)


def check(args: argparse.Namespace) -> int:
    """Check images and masks."""
    from .data.labelled import cores
    from .data.mask_check import check_masks
    from .recipes import get
    from .recipes.schema import Segmentation

    recipe = get(args.recipe or "small_masks.upernet_pale_t")
    if not isinstance(recipe, Segmentation):
        raise ValueError(f"{args.recipe} is no segmentation recipe; leave out --recipe for folders")
    given: dict[str, Any] = {"root": str(args.root), "images": args.images, "masks": args.masks}
    given |= {"classes": args.classes, "ignore": args.ignore}
    given |= {"reduce_zero": True if args.reduce_zero else None}
    data = recipe.override({f"data.{n}": v for n, v in given.items() if v is not None}).data
    splits = {data.train: data.train_source(recipe.seed), data.val: data.val_source(recipe.seed)}
    found = check_masks(splits, args.workers or cores(), shown(args.json))
    if args.json:
        say_json(found.plain())
        return 0 if found.good else 1
    table = Table("class", *(f"{s}: {w}" for s in found.splits for w in ("pixels, %", "images")))
    for name in found.classes:
        cells = []
        for split in found.splits.values():
            entry = split["classes"][name]
            cells += [f"{entry['share']:.3f}", str(entry["images"])]
        table.add_row(name, *cells)
    console().print(table)
    for name, split in found.splits.items():
        say(
            f"{name}: {split['images']} images, {split['unlabelled']:.1f} % of the pixels unlabelled"
        )
    say_problems(found)
    return 0 if found.good else 1


def evaluate(args: argparse.Namespace, recipe: Segmentation, weights: Any) -> None:
    """`pale eval` for a segmenter: each protocol as it is done, then the classes."""
    from .segment import evaluate, write_evaluation
    from .train.distributed import join

    found = []
    with join(args.device) as world:
        track = shown(args.json, world.main)
        for each in evaluate(recipe, weights, args.weights, world, args.protocol, track=track):
            found.append(each)
            if world.main and not args.json:
                figures, paper = each.figures, ""
                if each.paper is not None:
                    paper = f" (the paper: {each.paper:g})"
                say(
                    f"{each.protocol}-scale: mIoU {figures['miou']:.2f}{paper}, mAcc {figures['macc']:.2f}, "
                    f"aAcc {figures['aacc']:.2f}, {figures['images']:.0f} images; {each.how.told()}; "
                    "at the masks' size"
                )
        if not world.main:
            return
    folder = args.output or (args.weights / "evaluation" if args.weights.is_dir() else None)
    if folder is not None:
        write_evaluation(found, folder)
    if args.json:
        plain = {
            e.protocol: e.figures
            | {"paper_miou": e.paper, "inference": e.how.plain()}
            | {"per_class": e.details["per_class"]}
            for e in found
        }
        say_json(plain)
        return
    table = Table(
        "class", "pixels, %", *(f"{e.protocol}: {c}" for e in found for c in ("IoU", "Acc"))
    )
    for rows in zip(*(e.details["per_class"] for e in found), strict=True):
        numbers = [n for row in rows for n in (row["iou"], row["accuracy"])]
        cells = ["-" if n is None else f"{n:.2f}" for n in numbers]
        table.add_row(rows[0]["class"], f"{rows[0]['share']:.2f}", *cells)
    console().print(table)
    if folder is not None:
        say(f"{folder} written: evaluation_*.json, per_class.csv")
