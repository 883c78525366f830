"""Pale attention on a CUDA GPU: the Triton back-end against compiled permute + scaled dot product + permute back.

For the four stages of Pale-T at 224 px: forward, and forward with backward. Each figure is the median over replays of
a CUDA graph that runs through several sets of inputs, together larger than the L2 cache, so that neither launch gaps
nor the cache are measured. The plain version takes the best of PyTorch's flash, memory-efficient and cuDNN kernels.

    python benchmarks/attention_op.py --json benchmarks/results/attention_op.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pale.ops.pale_attention import triton_op
from pale.ops.pale_attention.region import Region

STAGES = {1: (56, 2), 2: (28, 4), 3: (14, 8), 4: (7, 16)}  # side of the map, heads
D, PALE = 32, 7
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
BANDWIDTH = 4.3e12  # bytes per second, a large device-to-device copy on an H200
Op = Callable[[Tensor, Tensor, Tensor], Tensor]


def triton_version(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Ours."""
    return triton_op.forward(q, k, v, Region((PALE, PALE)))


def plain_version(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What one would write for maps that the pale divides: (b, h, w, heads, d) -> (b, h, w, heads, d)."""
    halves = []
    for axis, x in zip(
        (1, 2), zip(*(x.chunk(2, dim=3) for x in (q, k, v)), strict=True), strict=True
    ):
        packed = []
        for y in x:
            y = y.transpose(1, axis).unflatten(1, (PALE, -1))  # (b, s, n, w, heads, d)
            packed.append(
                y.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(0, 1)
            )  # (b*n, heads, s*w, d)
        y = F.scaled_dot_product_attention(*packed)
        y = y.unflatten(2, (PALE, -1)).unflatten(0, (q.shape[0], -1))  # (b, n, heads, s, w, d)
        halves.append(y.permute(0, 3, 1, 4, 2, 5).flatten(1, 2).transpose(1, axis))
    return torch.cat(halves, dim=3)


def milliseconds(
    op: Op, sets: list[tuple[Tensor, ...]], backward: bool, replays: int = 30
) -> float:
    """Median time of a call."""

    def run() -> None:
        for q, k, v, g in sets:
            out = op(q, k, v)
            if backward:
                torch.autograd.grad(out, (q, k, v), g)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(sets))
    return statistics.median(times[3:])


def measure(
    stage: int, batch: int, dtype: torch.dtype, backward: bool, names: list[str]
) -> dict[str, float]:
    """Times in ms by version, and the memory floor."""
    side, heads = STAGES[stage]
    shape = (batch, side, side, heads, D)
    size = math.prod(shape) * dtype.itemsize
    # q, k, v in, out; backward q, k, v, out and its gradient in, three gradients out.
    times = {"floor": (12 if backward else 4) * size / BANDWIDTH * 1e3}
    count = max(4, math.ceil(256e6 / (4 * size)))
    sets = []
    for _ in range(count):
        q, k, v, g = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(4))
        sets.append((*(x.requires_grad_(backward) for x in (q, k, v)), g))
    expected = plain_version(*(x.detach().float() for x in sets[0][:3]))
    torch.testing.assert_close(triton_version(*sets[0][:3]).float(), expected, atol=2e-2, rtol=2e-2)
    times["triton"] = milliseconds(triton_version, sets, backward)
    for name in names:
        torch.compiler.reset()
        # A cached graph would not know of the kernel that is asked for.
        with sdpa_kernel(KERNELS[name]), torch.compiler.config.patch(force_disable_caches=True):
            times[name] = milliseconds(torch.compile(plain_version, dynamic=False), sets, backward)
    return times


def table(
    title: str, rows: dict[int, dict[str, float]], names: list[str]
) -> tuple[str, float | None]:
    """A table and the geometric mean of the ratios."""
    lines = [
        title,
        "stage  triton ms  floor ms  floor/triton  "
        + "".join(f"{n:>11}" for n in names)
        + "  best/triton",
    ]
    ratios = []
    for stage, t in rows.items():
        line = (
            f"{stage:>5}  {t['triton']:9.4f}  {t['floor']:8.4f}  {t['floor'] / t['triton']:12.2f}  "
        )
        line += "".join(f"{t[n]:11.4f}" for n in names)
        if names:
            ratios.append(min(t[n] for n in names) / t["triton"])
            line += f"  {ratios[-1]:11.2f}"
        lines.append(line)
    mean = statistics.geometric_mean(ratios) if ratios else None
    if mean is not None:
        lines.append(f"geometric mean of the ratios: {mean:.2f}")
    return "\n".join(lines), mean


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument(
        "--kernels", nargs="*", choices=KERNELS, default=list(KERNELS), help="of the plain version"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import triton

    device = torch.cuda.get_device_properties(0)
    about = {
        "gpu": device.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "batch": args.batch,
        "dtype": args.dtype,
    }
    print(", ".join(f"{k} {v}" for k, v in about.items()), flush=True)
    result: dict[str, object] = {"about": about}
    for title, backward in (("forward", False), ("forward + backward", True)):
        rows = {}
        for stage in args.stages:
            rows[stage] = measure(
                stage, args.batch, getattr(torch, args.dtype), backward, args.kernels
            )
        text, mean = table(title, rows, args.kernels)
        print(text, flush=True)
        result[title] = {"ms": rows, "geometric_mean": mean}
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
