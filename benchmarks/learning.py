"""Train with every back-end, eager, compiled and as a CUDA graph: the same steps on tiny-imagenet-50.

    python benchmarks/learning.py DATA OUT --size 64 --batch 256

DATA holds tiny-imagenet-50/. The mean training losses of the last tenth of the steps are compared; chance level
is ln 50.
"""

import argparse
import json
import math
import statistics

from common import arguments, curves, losses, made, summary, trained, write

BACKENDS = ("reference", "sdpa", "triton", "auto")
MODES = {
    "eager": ("--cuda_graph", "false"),
    "compiled": ("--compile", "true"),
    "graph": ("--cuda_graph", "true"),
}


def learn(args: argparse.Namespace, backend: str, mode: str) -> dict:
    run = trained(
        args.out / f"{backend}_{mode}",
        "small_data.pale_t",
        "--data.root", args.data / "tiny-imagenet-50",
        "--model.name", args.model,
        "--model.options", json.dumps({"backend": backend}),
        "--model.drop_path", 0,
        "--augment.auto", "null",
        "--augment.erase", 0,
        "--mix.mixup", 0, "--mix.cutmix", 0, "--mix.smoothing", 0,
        "--data.size", args.size,
        "--batch", args.batch,
        "--optim.lr_batch", args.batch,
        "--steps", args.steps, "--warmup_steps", args.steps // 10,
        "--eval_every", 1000, "--log_every", 1,
        "--data.workers", args.workers,
        *MODES[mode],
        jobs=args.jobs,
    )  # fmt: skip
    last = [loss for _, loss in losses(run)][-args.steps // 10 :]
    row = {"task": "tiny-imagenet-50", "model": f"{backend}, {mode}"} | summary(run)
    return row | {"loss": statistics.mean(last)}


def table(rows: list[dict]) -> str:
    least = min(r["loss"] for r in rows)
    lines = [f"Chance is {math.log(50):.3f}.", "", "| | loss | over the least | top-1 |"]
    lines += ["| --- | --- | --- | --- |"]
    lines += [
        f"| {r['model']} | {r['loss']:.3f} | {r['loss'] / least - 1:.1%} | {r['val']['top1']:.1f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--backend", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--mode", nargs="+", default=["eager", "compiled"], choices=MODES)
    parser.add_argument("--model", default="pale_tiny")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    def report(rows: list[dict]) -> str:
        write(args.out, "learning", args, rows, text := table(rows))
        curves(args.out, rows, args.out / "learning.png")
        return text

    made(args, [(b, m) for b in args.backend for m in args.mode], learn, report)


if __name__ == "__main__":
    main()
