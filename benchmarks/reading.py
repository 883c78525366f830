"""Whether reading photos keeps a GPU busy: workers, decoding on the GPU, and pictures kept there, each in a real run.

    python benchmarks/reading.py DATA OUT

DATA holds coco-mini/, whose photos (640x480 and the like) are linked often enough to make a set of --photos. For each
way the loader is measured alone, and then a run of imagenet.pale_t at 224 px with the paper's augmentation: images/s is
the median of the second half of its steps. What a run can reach at most is what it does with all pictures in memory.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from common import arguments, made, summary, trained, write

WAYS = ("pictures", "decoding", "nothing")


def photos(args: argparse.Namespace) -> Path:
    """Class folders with links to the photos, again and again."""
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
    root = args.out / "photos"
    words = ["imagenet.pale_t", "--data.root", root, "--data.on_device", way]
    words += ["--data.workers", args.workers]
    command = [sys.executable, "-m", "pale", "bench", "data", *map(str, words)]
    command += ["--batch", str(args.batch), "--seconds", str(args.seconds), "--json"]
    loader = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    run = trained(
        args.out / f"run_{way}",
        *words,
        *("--batch", args.batch, "--steps", args.steps, "--warmup_steps", 5, "--log_every", 1),
        *("--eval_every", 10**6, "--cuda_graph", "true"),
    )
    return {"task": "reading", "model": way, "loader": loader} | summary(run)


def table(rows: list[dict]) -> str:
    lines = ["| | loader alone | in training | waiting | ms of a worker |", "| --- " * 5 + "|"]
    for row in rows:
        loader = row["loader"]
        lines.append(
            f"| {row['model']} | {loader['images_per_s']:.0f} images/s | {row['images_per_s']:.0f} | "
            f"{row['data_wait']:.0%} | {loader['worker_ms']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--way", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--photos", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=8, help="to measure the loader")
    args = parser.parse_args()
    photos(args)

    def report(rows: list[dict]) -> str:
        write(args.out, "reading", args, rows, text := table(rows))
        return text

    made(args, [(way,) for way in args.way], read, report)


if __name__ == "__main__":
    main()
