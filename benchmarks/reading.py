"""Measure whether data loading keeps a GPU busy: workers, decoding on the GPU, or images kept there, in real runs.

    python benchmarks/reading.py DATA OUT

DATA holds coco-mini/, whose photos (about 640x480) are linked repeatedly to make a dataset of --photos. Each way is
measured with the loader alone and in a run of imagenet.pale_t at 224 px with the paper's augmentation (images/s over
the second half of its steps). The upper bound, the same step on a batch that is on the device already, comes last.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import repeat
from pathlib import Path

import torch
from common import arguments, made, summary, trained, write

from pale.recipes import get
from pale.train.distributed import join
from pale.train.evaluate import to_device
from pale.train.log import read as events
from pale.train.loop import build_trainer

WAYS = (
    "pictures",  # kept name
    "decoding",
    "nothing",
)
LOGGED = 10  # steps: reading every loss would make the GPU wait


def photos(args: argparse.Namespace) -> Path:
    """Write class folders with repeated links to the photos."""
    root = args.out / "photos"
    found = sorted((args.data / "coco-mini/train2017").resolve().glob("*.jpg"))
    for split, count in (("train", args.photos), ("val", 64)):
        for i in range(count):
            link = root / split / f"class_{i % 2}" / f"{i}.jpg"
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                os.symlink(found[i % len(found)], link)
    return root


def read(args: argparse.Namespace, way: str) -> dict:
    if way == "in memory":
        return in_memory(args)
    words = ["imagenet.pale_t", "--data.root", args.out / "photos", "--data.on_device", way]
    words += ["--data.workers", args.workers]
    command = [sys.executable, "-m", "pale", "bench", "data", *map(str, words)]
    command += ["--batch", str(args.batch), "--seconds", str(args.seconds), "--json"]
    loader = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    run = trained(
        args.out / f"run_{way}",
        *words,
        *("--batch", args.batch, "--steps", args.steps, "--warmup_steps", 5),
        *("--log_every", LOGGED, "--eval_every", 10**6, "--cuda_graph", "true"),
    )
    steps = [e for e in events(run / "log.jsonl") if e["event"] == "step"]
    later = [e for e in steps if e["step"] > args.steps // 2]
    return {"task": "reading", "model": way, "loader": loader} | {
        **summary(run),
        "images_per_s": statistics.harmonic_mean(e["images_per_s"] for e in later),
        "data_wait": statistics.mean(e["data_wait"] for e in later),
    }


def in_memory(args: argparse.Namespace) -> dict:
    """Measure the same steps on one batch that is on the device already."""
    recipe = get("imagenet.pale_t").override(
        {
            "data.root": str(args.out / "photos"),
            "data.on_device": "nothing",
            "batch": str(args.batch),
            "steps": str(args.steps),
            "warmup_steps": "5",
            "cuda_graph": "true",
        }
    )
    with join() as world:
        trainer = build_trainer(recipe, args.out / "in_memory", world)
        batch = trainer.task.collate([trainer.data[0, i] for i in range(args.batch)])
        batches = map(dict, repeat(to_device(batch, world.device)))
        times = []
        for step in range(args.steps):
            if step % LOGGED == 0:
                if world.device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter())
            trainer.make_step(batches)
        seconds = (times[-1] - times[len(times) // 2]) / (len(times) - 1 - len(times) // 2) / LOGGED
    return {"task": "reading", "model": "in memory", "images_per_s": args.batch / seconds}


def table(rows: list[dict]) -> str:
    lines = ["| | loader alone | in training | waiting | ms of a worker |", "| --- " * 5 + "|"]
    for row in rows:
        if loader := row.get("loader"):
            cells = f"{loader['images_per_s']:.0f} images/s | {row['images_per_s']:.0f} | "
            cells += f"{row['data_wait']:.0%} | {loader['worker_ms']:.2f}"
        else:
            cells = f"- | {row['images_per_s']:.0f} | - | -"
        lines.append(f"| {row['model']} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--way", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--photos", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=8, help="to measure the loader")
    args = parser.parse_args()
    photos(args)

    def report(rows: list[dict]) -> str:
        write(args.out, "reading", args, rows, text := table(rows))
        return text

    made(args, [(way,) for way in (*args.way, "in memory")], read, report)


if __name__ == "__main__":
    main()
