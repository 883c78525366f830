"""Seconds until a model has run for the first time, with empty caches and with those of an earlier process.

    python benchmarks/first_call.py -o benchmarks/results/first_call_h200

Each row is a process of its own, with Triton's and Inductor's caches in an empty folder or in the one that the row
before it has filled. Times are those of the call alone: imports, the context of the GPU and the weights come before it.
Cases:

- `inference`: Pale-T through `pale.optimize`, bf16.
- `training`: forward and backward pass of Pale-T under bf16 autocast.
- `peer, compiled`: timm's Swin-T through `torch.compile`.

`warm-up` is `pale.warm_up`, which compiles kernels for all image sizes in several threads, before the first call.
Writes OUT.json and OUT.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZE = 224
PEER = "swin_tiny_patch4_window7_224"
CASES = ("inference", "training")
COLUMNS = ("case", "model", "caches", "warm-up, s", "first call, s", "second call, s")


def measure(case: str, peer: bool, warm: bool, device: str, batch: int) -> dict[str, Any]:
    """Return the times of this process."""
    import timm
    import torch

    import pale
    from pale.train.distributed import join
    from pale.train.environment import environment

    training = case == "training"
    model = timm.create_model(PEER if peer else "pale_tiny").to(device).train(training)
    x = torch.randn(batch, 3, SIZE, SIZE, device=device)
    if not training:
        x = x.bfloat16()
        model = model.bfloat16() if peer else pale.optimize(model)
    call = torch.compile(model, dynamic=False) if peer else model
    grad = torch.enable_grad if training else torch.inference_mode

    def step() -> None:
        with grad(), torch.autocast(device, torch.bfloat16, enabled=training):
            y = call(x)
        if training:
            y.float().square().mean().backward()
            model.zero_grad(set_to_none=True)

    def seconds(function: Any) -> float:
        begin = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def warm_up() -> None:
        with grad(), torch.autocast(device, torch.bfloat16, enabled=training):
            pale.warm_up(model)

    if device == "cuda":
        torch.cuda.synchronize()
    times = {"warm-up, s": seconds(warm_up)} if warm else {}
    times |= {"first call, s": seconds(step), "second call, s": seconds(step)}
    with join() as world:
        return times | {"environment": environment(world) | {"cores": os.cpu_count()}}


def rows(device: str, batch: int, deadline: float) -> list[dict[str, Any]]:
    """Run every case in processes of their own; none starts after the deadline."""
    found: list[dict[str, Any]] = []
    plan = [
        (case, peer, warm) for case in CASES for peer, warm in ((0, False), (0, True), (1, False))
    ]
    for case, peer, warm in plan:
        with tempfile.TemporaryDirectory() as folder:
            for caches in ("empty", "filled"):
                if time.monotonic() > deadline:
                    return found
                row = {"case": case, "model": "Swin-T, compiled" if peer else "Pale-T"}
                row |= {"caches": caches} | child(folder, case, peer, warm, device, batch)
                found.append(row)
                print(line(row), flush=True)
    return found


def child(folder: str, *words: object) -> dict[str, Any]:
    """Return what a process with these caches prints, or its error."""
    caches = {
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
    }
    command = [sys.executable, __file__, "--measure", json.dumps(words)]
    done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "error" in row:
        error = row["error"].replace("|", "/")
        return f"| {row['case']} | {row['model']} | {row['caches']} | failed: {error} | | |"
    cells = [row.get(name, "") for name in COLUMNS]
    return f"| {' | '.join(f'{c:.2f}' if isinstance(c, float) else c for c in cells)} |"


def page(found: list[dict[str, Any]], device: str, batch: int) -> str:
    """Return the page of results."""
    about = next((row["environment"] for row in found if "environment" in row), {})
    words = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = [
        "# First call",
        "",
        f"{time.strftime('%Y-%m-%d', time.gmtime())}: {words}. Batch {batch}, {SIZE} px, bf16; one process per row.",
        f"`python benchmarks/first_call.py --device {device} --batch {batch}`",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
    ]
    return "\n".join([*lines, *map(line, found), ""])


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="without its ending")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no process after this")
    args = parser.parse_args()
    found = rows(args.device, args.batch, time.monotonic() + 60 * args.minutes)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.output.with_suffix(".md").write_text(page(found, args.device, args.batch))


if __name__ == "__main__":
    main()
