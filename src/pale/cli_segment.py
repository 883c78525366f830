"""The commands of segmentation: its part of eval and of data check."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .cli_say import console, say, say_json, say_problems
from .progress import shown

if TYPE_CHECKING:
    from .recipes.schema import Segmentation
    from .tasks.segmentation import MaskData

SPLITS = ["train", "val"]  # what --splits is where it is not given


def add_check(check: Any) -> None:
    """Options of `pale data check` for images with masks."""
    check.set_defaults(splits=SPLITS)
    check.add_argument(
        "--images", metavar="DIR", help="masks, objects: folder of pictures, under the root"
    )
    masks = check.add_argument_group(
        "pictures with masks",
        "DIR holds folders of pictures and of masks, each with a folder a split.",
    )
    masks.add_argument("--recipe", help="a segmentation recipe that says what lies where")
    masks.add_argument("--masks", metavar="DIR", help="folder of masks, under the root")
    masks.add_argument("--classes", metavar="FILE", help="class list, under the root")
    masks.add_argument("--ignore", type=int, nargs="+", help="values that are no label")
    masks.add_argument("--reduce-zero", action="store_true", help="classes count from 1")
    masks.add_argument(
        "--mask-kind", choices=["auto", "index", "colour"], help="what the pixels are"
    )
    masks.add_argument("--unlisted", choices=["error", "ignore"], help="values that are not listed")
    masks.add_argument("--lists", metavar="FILE", help="names of a split's pictures, {split} in it")
    masks.add_argument(
        "--hold-out", type=float, metavar="SHARE", help="no folders of splits: validate on a share"
    )


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of `data` that the options for masks give."""
    names = ("masks", "classes", "ignore", "mask_kind", "unlisted", "lists", "hold_out")
    given = {name: getattr(args, name) for name in names} | {
        "reduce_zero": args.reduce_zero or None
    }
    return {name: value for name, value in given.items() if value is not None}


def mask_options(args: argparse.Namespace) -> list[str]:
    """Options for masks that were given."""
    names = ["recipe"] if args.recipe else []
    return [f"--{name.replace('_', '-')}" for name in (*names, *_given(args))]


def wants_masks(args: argparse.Namespace) -> bool:
    """Whether `pale data check` is about masks."""
    return bool(args.images or mask_options(args))


def _data(args: argparse.Namespace) -> tuple[MaskData, int]:
    """What to look at, and the seed of the share that is held out."""
    from .recipes import get
    from .recipes.schema import Segmentation

    recipe = get(args.recipe or "small_masks.upernet_pale_t")
    if not isinstance(recipe, Segmentation):
        raise ValueError(f"{args.recipe} is no segmentation recipe; leave out --recipe for folders")
    given = {"root": str(args.root)} | ({"images": args.images} if args.images else {})
    if args.splits is not SPLITS:
        given |= {"train": args.splits[0]}
    data = recipe.override({f"data.{n}": v for n, v in (given | _given(args)).items()}).data
    for name, what in (
        ("images", "DIR, the folder of pictures"),
        ("masks", "DIR, the folder of masks (for COCO's json: --annotations FILE)"),
        ("classes", "FILE, a line `value name r g b` for each class"),
    ):
        if getattr(data, name) is None:
            raise ValueError(f"--{name} is not given; to check masks give --{name} {what}")
    return data, recipe.seed


def check(args: argparse.Namespace) -> int:
    """Check images and masks."""
    from .data.labelled import cores
    from .data.mask_check import check_masks

    if args.sheet:
        raise ValueError("--sheet draws folders of classes; there is none of masks: leave it out")
    data, seed = _data(args)
    absent: list[str] = []
    if data.hold_out:
        parts = (data.train_source(seed, absent), data.val_source(seed, []))  # named once
        splits = dict(zip((data.train, "held out"), parts, strict=True))
    else:
        names = (data.train, data.val) if args.splits is SPLITS else args.splits
        splits = {name: data.files(name, absent) for name in names}
    found = check_masks(splits, args.workers or cores(), shown(args.json), absent)
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
