"""onnxruntime on a CPU beside eager and compiled PyTorch, ours beside timm's Swin-T exported the same way.

    python benchmarks/onnx_cpu.py --threads 2 -o benchmarks/results/onnx_cpu.md

All ways of all models take turns in one process, so that other load affects all in the same way; a row is the median
of its rounds. Swin supports a single size, so it is exported with `--fixed`; ours is exported both ways. The machine
must be idle: the quartiles show whether it was.
"""

import argparse
import platform
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import onnxruntime
import timm
import torch

import pale
from pale.bench.models import create_model
from pale.bench.timing import quartiles
from pale.train.environment import commit

MODELS = ("pale_tiny", "swin_tiny_patch4_window7_224")
WAYS = ("eager", "compiled", "onnx", "every size", "int8")


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Threads that spin while they wait would slow PyTorch down, which is timed in the same process.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def ways(name: str, size: int, threads: int, folder: Path, chosen: list[str]):
    """Return callables by name, each images -> logits."""
    model = create_model(name, (size, size)).eval().requires_grad_(False)
    found = {}
    if "eager" in chosen:
        found["eager"] = model
    if "compiled" in chosen:
        found["compiled"] = torch.compile(model, dynamic=False)
    made = [(kind, True) for kind in ("onnx", "int8") if kind in chosen]
    made += [("onnx", False)] * (name.startswith("pale_") and "every size" in chosen)
    for kind, fixed in made:
        way = kind if fixed else f"{kind}, every size"
        path = folder / f"{name}.{way}.onnx"
        done = pale.export(model, path, kind, fixed=fixed, sizes=[(1, size, size)])
        print(f"{name}, {way}: {done.bytes / 1e6:.1f} MB, off by {done.checks[0].share:.1e}")
        run = session(path, threads)
        found[way] = lambda x, run=run: run.run(None, {"images": x.numpy()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:-1])
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        calls = {
            (name, way): call
            for name in args.models
            for way, call in ways(name, args.size, args.threads, Path(folder), args.ways).items()
        }
        for batch in args.batch:
            x = torch.randn(batch, 3, args.size, args.size)
            times = {key: [] for key in calls}
            for call in calls.values():
                for _ in range(3):
                    call(x)
            for _ in range(args.rounds):
                for key, call in calls.items():
                    start = time.perf_counter()
                    call(x)
                    times[key].append(1e3 * (time.perf_counter() - start))
            rows |= {(batch, *key): measured for key, measured in times.items()}
    lines = [
        f"# onnxruntime {onnxruntime.__version__} on a CPU",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, {args.threads} threads, "
        f"{args.size}x{args.size}, fp32, torch {torch.__version__}, timm {timm.__version__}, commit {commit()}; "
        f"medians of {args.rounds} rounds in turn. `python benchmarks/onnx_cpu.py {shlex.join(sys.argv[1:])}`",
        "",
        "`onnx` is a file for this one size (`pale export --fixed`), `onnx, every size` computes its groups from the "
        "size at every call.",
        "",
        f"| batch | model | way | ms (quartiles) | least ms | images/s | speed of {args.models[0]} (least ms) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (batch, name, way), measured in rows.items():
        ms, (low, high) = statistics.median(measured), quartiles(measured)
        speed = ""
        if name != args.models[0] and (first := rows.get((batch, args.models[0], way))):
            speed = f"{ms / statistics.median(first):.2f} ({min(measured) / min(first):.2f})"
        lines.append(
            f"| {batch} | {name} | {way} | {ms:.1f} ({low:.1f} to {high:.1f}) | {min(measured):.1f} "
            f"| {1e3 * batch / ms:.1f} | {speed} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text)


if __name__ == "__main__":
    main()
