"""Mask R-CNN on Pale-T: overfit 64 images of COCO, and train on pet silhouettes beside timm's Swin-T.

Both backbones get the same recipe, steps and data. Finished runs are not repeated and interrupted ones resume. DATA
holds coco-mini/ and oxford-iiit-pet/.

    python benchmarks/detection.py DATA OUT                       # everything, three seeds for ours, one for the peer
    python benchmarks/detection.py DATA OUT --only overfit
    python benchmarks/detection.py DATA OUT --only pets --seeds 1 --peer-seeds 1 --settings '--epochs 20'

OUT gets a folder for each run, detection.json, detection.md, curves.png and predictions.png (predicted
shapes on white only: the images of the datasets must not be redistributed).
"""

import argparse
import json
import shlex
from pathlib import Path

import numpy as np
from common import arguments, curves, ends, made, mean, strips, summary, trained, write
from PIL import Image

from pale.data import rle
from pale.tasks.detection.draw import overlay

MODELS = {"pale_t": "pale_tiny", "swin_t": "swin_tiny_patch4_window7_224"}
TASKS = {"overfit": "coco.overfit", "pets": "pets.mask_rcnn_pale_t"}
ROOTS = {"overfit": "coco-mini", "pets": "oxford-iiit-pet"}
GOAL = {"box_ap50": 80.0, "mask_ap50": 70.0}  # on the 64 overfitted images
COLUMNS = ("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75")


def detect(args: argparse.Namespace, task: str, label: str, seed: int) -> dict:
    words = [TASKS[task], "--data.root", args.data / ROOTS[task], "--seed", seed]
    words += ["--model.name", MODELS[label], "--data.workers", args.workers]
    words += shlex.split(args.settings if task == "pets" else args.overfit_settings)
    run = trained(args.out / f"{task}_{label}_{seed}", *words, jobs=args.jobs)
    return {"task": task, "model": label, "seed": seed} | summary(run)


def table(rows: list[dict]) -> str:
    head = " | ".join(name.replace("_ap", " AP") for name in COLUMNS)
    lines = [f"| | backbone | seeds | {head} |", "| --- " * (3 + len(COLUMNS)) + "|"]
    for task in TASKS:
        for label in MODELS:
            mine = [r for r in rows if r["task"] == task and r["model"] == label]
            if mine:
                cells = [mean([r["val"][name] for r in mine]) for name in COLUMNS]
                lines.append(f"| {task} | {label} | {len(mine)} | {' | '.join(cells)} |")
    for row in rows:
        if row["task"] == "overfit":
            reached = all(row["val"][name] > goal for name, goal in GOAL.items())
            lines.append(f"\nOverfitted (above {GOAL}): {'yes' if reached else 'no'}")
    return "\n".join(lines) + "\n"


def predictions(args: argparse.Namespace, rows: list[dict], path: Path) -> None:
    """Draw the predictions of the first seed of each model for its best and worst images, without the images."""
    lines = []
    for row in (r for r in rows if r["task"] == "pets" and r["seed"] == 0):
        details = json.loads((args.out / row["run"] / "evaluation.json").read_text())
        drawn = [
            (shapes(e["detections"], details["classes"]), f"F1 {e['f1']:.0f}")
            for e in ends(details["gallery"])
        ]
        lines.append((f"{row['model']}: best and worst pets", drawn))
    strips(lines, path)


def shapes(found: list[dict], classes: list[str]) -> Image.Image | None:
    """Return the predictions drawn on grey, None if there are none."""
    if not found:
        return None
    mask = found[0]["segmentation"]
    h, w = rle.draw(mask, tuple(mask["size"])).shape
    return overlay(Image.fromarray(np.full((h, w, 3), 235, np.uint8)), found, classes, [1, 2])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds of our model on pets")
    parser.add_argument("--peer-seeds", type=int, default=1)
    parser.add_argument(
        "--settings", default="", help="settings of the runs on pets: '--epochs 10'"
    )
    parser.add_argument("--overfit-settings", default="", help="settings of the overfitted run")
    args = parser.parse_args()
    seeds = {"pale_t": args.seeds, "swin_t": args.peer_seeds}
    # Peers before further seeds: if time runs out, only seeds are missing.
    plan = [("overfit", "pale_t", 0)] if args.only in (None, "overfit") else []
    if args.only in (None, "pets"):
        plan += [
            ("pets", label, seed)
            for seed in range(max(seeds.values()))
            for label in MODELS
            if seed < seeds[label]
        ]

    def report(rows: list[dict]) -> str:
        write(args.out, "detection", args, rows, text := table(rows))
        curves(args.out, rows, args.out / "curves.png")
        predictions(args, rows, args.out / "predictions.png")
        return text

    made(args, plan, detect, report)


if __name__ == "__main__":
    main()
