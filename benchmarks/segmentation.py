"""UperNet on Pale-T beside the same UperNet on timm's Swin-T: CamVid pre-trained, pets from scratch.

Both backbones get the same recipe, steps and data. Finished runs are not repeated and interrupted ones resume. DATA
holds tiny-imagenet-50/, camvid/ and oxford-iiit-pet/.

    python benchmarks/segmentation.py DATA OUT                     # everything, three seeds for ours, one for the peer
    python benchmarks/segmentation.py DATA OUT --only camvid --seeds 1 --peer-seeds 1

OUT gets a folder for each run, segmentation.json, segmentation.md, curves.png and predictions.png (predicted
classes only: the images of the datasets must not be redistributed).
"""

import argparse
import json
import shlex
from pathlib import Path

from common import arguments, curves, ends, made, mean, pale, strips, summary, trained, write

from pale.recipes import get
from pale.tasks.segmentation.draw import indexed
from pale.tasks.segmentation.metric import unpack

MODELS = {"pale_t": "pale_tiny", "swin_t": "swin_tiny_patch4_window7_224"}
ROOTS = {"camvid": "camvid", "pets": "oxford-iiit-pet"}


def pretrained(args: argparse.Namespace, label: str) -> Path:
    """Pre-train as small_data.py does on tiny-imagenet-50; Swin keeps windows of 7, so that all weights fit later."""
    words: list[object] = ["small_data.pale_t", "--data.root", args.data / "tiny-imagenet-50"]
    words += ["--model.name", MODELS[label]]
    if label == "swin_t":
        words += ["--model.options", json.dumps({"always_partition": True, "img_size": 128})]
    words += ["--data.workers", args.workers, "--data.on_device=pictures", "--eval_every", 20]
    words += shlex.split(args.pretraining)
    return trained(args.out / f"pretrain_{label}", *words, jobs=args.jobs)


def segment(args: argparse.Namespace, task: str, label: str, seed: int) -> dict:
    words = [f"{task}.upernet_pale_t", "--data.root", args.data / ROOTS[task], "--seed", seed]
    words += ["--model.name", MODELS[label], "--data.workers", args.workers]
    words += shlex.split(args.settings)
    if task == "camvid":
        words += ["--init", pretrained(args, label)]
    run = trained(args.out / f"{task}_{label}_{seed}", *words, jobs=args.jobs)
    row = {"task": task, "model": label, "seed": seed} | summary(run)
    if task == "camvid":
        where = run / "test"
        if not (where / "evaluation_multi.json").is_file():
            words = ["eval", run, "--data.val", "test", "-o", where, "--protocol", "both"]
            pale(*words, run=run, jobs=args.jobs)
        for protocol in ("single", "multi"):
            found = json.loads((where / f"evaluation_{protocol}.json").read_text())
            row[f"test_{protocol}"] = found["figures"]
    return row


def table(rows: list[dict]) -> str:
    lines = [
        "| | backbone | seeds | mIoU | mAcc | aAcc | several scales |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in ROOTS:
        for label in MODELS:
            mine = [r for r in rows if r["task"] == task and r["model"] == label]
            if not mine:
                continue
            key, where = ("test_single", "test") if task == "camvid" else ("val", "test")
            cells = [mean([r[key][name] for r in mine]) for name in ("miou", "macc", "aacc")]
            multi = mean([r["test_multi"]["miou"] for r in mine]) if task == "camvid" else "-"
            lines.append(
                f"| {task} ({where}) | {label} | {len(mine)} | {' | '.join(cells)} | {multi} |"
            )
    return "\n".join(lines) + "\n"


def predictions(args: argparse.Namespace, rows: list[dict], path: Path) -> None:
    """Draw the predictions of the first seed of each model for the same images, one row per model."""
    lines = []
    for row in sorted(
        (r for r in rows if r["seed"] == 0), key=lambda r: list(ROOTS).index(r["task"])
    ):
        task = row["task"]
        recipe = get(f"{task}.upernet_pale_t").override({"data.root": str(args.data / ROOTS[task])})
        colours = recipe.data.class_list().colours
        entries = json.loads((args.out / row["run"] / "evaluation.json").read_text())["gallery"]
        drawn = [
            (indexed(unpack(e["prediction"]), colours).convert("RGB"), f"mIoU {e['miou']:.0f}")
            for e in ends(entries)
        ]
        lines.append((f"{task}, {row['model']}: best and worst", drawn))
    strips(lines, path)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=list(ROOTS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds of our model")
    parser.add_argument("--peer-seeds", type=int, default=1)
    parser.add_argument(
        "--pretraining", default="", help="settings of the pre-training: '--epochs 1'"
    )
    parser.add_argument(
        "--settings", default="", help="settings of the segmentation runs: '--steps 10'"
    )
    args = parser.parse_args()
    seeds = {"pale_t": args.seeds, "swin_t": args.peer_seeds}
    # Peers before further seeds: if time runs out, only seeds are missing.
    plan = [
        (task, label, seed)
        for seed in range(max(seeds.values()))
        for task in ROOTS
        for label in MODELS
        if seed < seeds[label] and args.only in (None, task)
    ]

    def report(rows: list[dict]) -> str:
        write(args.out, "segmentation", args, rows, text := table(rows))
        curves(args.out, rows, args.out / "curves.png")
        predictions(args, rows, args.out / "predictions.png")
        return text

    made(args, plan, segment, report)


if __name__ == "__main__":
    main()
