"""Images per second of our models beside timm's, in one process: alternating, warmed up, random data, medians.

    python benchmarks/speed.py                              # CPU, fp32, as in benchmarks/results/cpu.md
    python benchmarks/speed.py --device cuda --dtype bf16 --batch 256 --rounds 30 --train

The first model named is ours; ratios are its speed over each other one's.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path

import timm
import torch

import pale

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def step_of(model, x, train, dtype):
    autocast = torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32)

    def infer():
        with torch.inference_mode(), autocast:
            model(x)

    def fit():
        with autocast:
            loss = model(x).square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    return fit if train else infer


def seconds(step, device):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(names, mode, batch, args):
    x = torch.randn(batch, 3, args.size, args.size, device=args.device)
    steps = {}
    for name in names:
        torch.manual_seed(0)
        model = timm.create_model(name).to(args.device).train(args.train)
        torch._dynamo.reset()
        step = step_of(
            torch.compile(model) if mode == "compiled" else model, x, args.train, DTYPES[args.dtype]
        )
        for _ in range(args.warmup):
            step()
        steps[name] = step
    times = {name: [] for name in names}
    for _ in range(args.rounds if batch > 1 else 3 * args.rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, args.device))
    ours = statistics.median(times[names[0]])
    rows = []
    for name in names:
        median = statistics.median(times[name])
        rows.append(
            {
                "model": name,
                "mode": mode,
                "batch": batch,
                "images_per_s": batch / median,
                "ms": 1e3 * median,
                "ms_quartiles": [1e3 * q for q in statistics.quantiles(times[name], n=4)[::2]],
                "ours_is_faster_by": median / ours,
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["pale_tiny", "swin_tiny_patch4_window7_224"]
    )
    parser.add_argument(
        "--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"]
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--train", action="store_true", help="forward and backward")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write everything there too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        where = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""
        )
        where = f"{where or platform.processor()}, {args.threads} threads"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    about = {
        "hardware": where,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "pale": pale.__version__,
        "commit": commit,
        "size": args.size,
        "dtype": args.dtype,
        "train": args.train,
    }
    print(json.dumps(about))
    rows = []
    print(
        "| mode | batch | model | images/s | ms (quartiles) | ours / it |\n| --- | --- | --- | --- | --- | --- |"
    )
    for mode in args.modes:
        for batch in args.batch:
            for row in measure(args.models, mode, batch, args):
                rows.append(row)
                low, high = row["ms_quartiles"]
                print(
                    f"| {mode} | {batch} | {row['model']} | {row['images_per_s']:.1f} "
                    f"| {row['ms']:.1f} ({low:.1f} to {high:.1f}) | {row['ours_is_faster_by']:.2f} |",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
