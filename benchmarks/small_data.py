"""Classification from scratch on small sets: Pale-T beside models of timm's under the same recipe.

    python benchmarks/small_data.py DATA OUT                       # three seeds for ours, one for the peers
    python benchmarks/small_data.py DATA OUT --jobs 3 --workers 5  # on a large GPU, three runs at once
    python benchmarks/small_data.py DATA OUT --hold-out 0.1 --only tiny --models pale_t   # to choose settings

DATA holds tiny-imagenet-50/ and oxford-iiit-pet/. What is done already is not done again, so a run that was cut off
goes on. With --hold-out, validation is on a share of the training images, and the val images are not read.
"""

import argparse
import json
import shlex
from pathlib import Path

from common import arguments, curves, made, mean, speeds, summary, trained, write

MODELS = {
    "pale_t": "pale_tiny",
    "swin_t": "swin_tiny_patch4_window7_224",
    "convnext_t": "convnext_tiny",
    "resnet50": "resnet50",
}
PLANS = {"tiny": list(MODELS), "pets": ["pale_t", "swin_t", "convnext_t"]}


LISTS = {"train": "trainval", "val": "test"}


def pets_list(out: Path, split: str) -> Path:
    return out.resolve() / f"pets_{split}.txt"


def write_pets_lists(root: Path, out: Path) -> None:
    """Lists of pictures and breeds from those of the data set."""
    for split in LISTS.values():
        lines = [
            line.split()[0]
            for line in (root / f"annotations/{split}.txt").read_text().splitlines()
            if line and not line.startswith("#")
        ]
        told = "".join(f"images/{n}.jpg {n.rpartition('_')[0]}\n" for n in lines)
        pets_list(out, split).write_text(told)


def classify(args: argparse.Namespace, task: str, label: str, seed: int) -> dict:
    words = ["small_data.pale_t", "--model.name", MODELS[label], "--seed", seed]
    if label == "swin_t":
        size = args.pets_size if task == "pets" else 128
        words += ["--model.options", json.dumps({"img_size": size})]
    if task == "tiny":
        words += ["--data.root", args.data / "tiny-imagenet-50"]
    else:
        words += ["--data.kind", "list", "--data.root", args.data / "oxford-iiit-pet"]
        for option, split in LISTS.items():
            words += [f"--data.{option}", pets_list(args.out, split)]
        words += ["--data.size", args.pets_size, "--epochs", args.pets_epochs]
        words += ["--batch", 256, "--warmup_epochs", 10]
    words += ["--data.workers", args.workers, "--eval_every", 20, "--data.on_device", "pictures"]
    if args.hold_out:
        words += ["--data.hold_out", args.hold_out]
    words += shlex.split(args.settings)
    run = trained(args.out / f"{task}_{label}_{seed}", *words, jobs=args.jobs)
    return {"task": task, "model": label, "seed": seed} | summary(run)


def table(rows: list[dict]) -> str:
    lines = [
        "| | model | seeds | top-1 | top-5 | images/s | waiting for data |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in PLANS:
        for label in MODELS:
            if not (mine := [r for r in rows if r["task"] == task and r["model"] == label]):
                continue
            cells = [mean([r["val"][name] for r in mine]) for name in ("top1", "top5")]
            if quiet := speeds(mine):
                cells += [f"{quiet[0]['images_per_s']:.0f}", f"{quiet[0]['data_wait']:.0%}"]
            else:
                cells += ["-", "-"]
            lines.append(f"| {task} | {label} | {len(mine)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=PLANS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3, help="of ours")
    parser.add_argument("--peer-seeds", type=int, default=1)
    parser.add_argument("--pets-size", type=int, default=160)
    parser.add_argument("--pets-epochs", type=int, default=150)
    parser.add_argument("--hold-out", type=float, default=0.0)
    parser.add_argument("--settings", default="", help="of all runs: '--cuda_graph true'")
    args = parser.parse_args()
    # Peers before further seeds: when time runs out, seeds are what is missing.
    plan = [
        (task, label, seed)
        for seed in range(max(args.seeds, args.peer_seeds))
        for task, labels in PLANS.items()
        for label in labels
        if seed < (args.seeds if label == "pale_t" else args.peer_seeds)
        and label in args.models
        and args.only in (None, task)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    if any(task == "pets" for task, _, _ in plan):
        write_pets_lists(args.data / "oxford-iiit-pet", args.out)

    def report(rows: list[dict]) -> str:
        write(args.out, "small_data", args, rows, text := table(rows))
        curves(args.out, rows, args.out / "small_data.png")
        return text

    made(args, plan, classify, report)


if __name__ == "__main__":
    main()
