"""Measure the host's part of a training step with the Triton kernels; needs no GPU.

    python benchmarks/host_cost.py -o benchmarks/results/host_cost_cpu

The process runs under TRITON_INTERPRET=1, so that the operators accept tensors on the CPU, and no kernel runs: its
launch is counted instead. What remains is Python, the dispatcher, autograd and PyTorch's own operations, which here
compute on the CPU. The model has the depths and code paths of Pale-T, but few channels and tiny maps, so that these
computations take little time. The figures are the host's part without kernels: compare them between versions, not with
the time of a step on a GPU.

Counts are of one step, forward and backward, in bf16 autocast with drop path. Writes OUT.json and OUT.md.
"""

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import pale
from pale.ops.block import grids
from pale.ops.pale_attention import triton_op as attention
from pale.train.distributed import World
from pale.train.environment import environment

# As Pale-T: two stages with few channels, whose MLP is fused, and two with many.
CONFIG = {"channels": (32, 32, 64, 64), "heads": (2, 2, 2, 2)}
WHOLE = 32
NOTE = (
    "Host part only: kernels are counted, not run; PyTorch's own operations compute on the CPU, with few channels. "
    "Not the time of a step on a GPU."
)
NODE = "autograd::engine::evaluate_function: "
SHOWN = 12  # operations in the table

launches: Counter[str] = Counter()


def count_launch(module: str, name: str, grid: tuple[int, ...], *_: object, **__: object) -> None:
    """Count a kernel in place of running it."""
    launches[name] += 1


def step(model: nn.Module, x: Tensor) -> None:
    """Run forward and backward pass."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    loss.backward()


def count(model: nn.Module, x: Tensor) -> dict[str, dict[str, int]]:
    """Return launches, dispatched operations (nested ones too) and autograd nodes of one step, by name."""
    launches.clear()
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(model, x)
    names = Counter({event.key: event.count for event in profiler.key_averages()})
    nodes = {n.removeprefix(NODE): i for n, i in names.items() if n.startswith(NODE)}
    kinds = ("aten::", "pale::")
    return {
        "launches": dict(launches),
        "operations": {n: i for n, i in names.items() if n.startswith(kinds)},
        "nodes": nodes,
    }


def timed(run: Callable[..., object], *arguments: object) -> float:
    """Return the microseconds of CPU time of a call, which a busy machine changes least."""
    began = time.process_time()
    run(*arguments)
    return 1e6 * (time.process_time() - began)


def passes(blocks: nn.Module, x: Tensor) -> tuple[float, float]:
    """Return the microseconds of forward and backward pass of the blocks of a stage."""
    outputs: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16):
        forward = timed(lambda: outputs.append(blocks(x)))
    return forward, timed(outputs[0].backward, torch.ones_like(outputs[0]))


def measure(model: nn.Module, x: Tensor, rounds: int) -> dict[str, float]:
    """Return microseconds: medians of the whole step, and of a block (mean over all blocks)."""
    found: dict[str, list[float]] = {"step": [], "block_forward": [], "block_backward": []}
    maps: list[Tensor] = []
    hooks = [
        stage.blocks.register_forward_pre_hook(lambda _, given: maps.append(given[0].detach()))
        for stage in model.stages
    ]
    step(model, x)
    for hook in hooks:
        hook.remove()
    stages = [
        (stage.blocks, y.requires_grad_()) for stage, y in zip(model.stages, maps, strict=True)
    ]
    blocks = sum(len(chain) for chain, _ in stages)
    for _ in range(rounds):
        model.zero_grad()
        found["step"].append(timed(step, model, x))
        model.zero_grad()
        halves = [passes(chain, given) for chain, given in stages]
        for name, times in zip(
            ("block_forward", "block_backward"), zip(*halves, strict=True), strict=True
        ):
            found[name].append(sum(times) / blocks)
    return {name: statistics.median(values) for name, values in found.items()}


def table(about: dict, counts: dict, times: dict[str, float], rounds: int) -> list[str]:
    """Return the page."""
    totals = {name: sum(values.values()) for name, values in counts.items()}
    lines = [
        "# The host's part of a training step",
        "",
        f"{NOTE} Depths of Pale-T, cpe, drop path, bf16 autocast; CPU time, medians of {rounds} rounds. "
        f"{about['device']}, torch {about['torch']}, commit {about['commit'][:7]}.",
        "`python benchmarks/host_cost.py -o OUT`",
        "",
        "| | per step |",
        "| --- | --- |",
        f"| Triton kernels launched | {totals['launches']} |",
        f"| operations dispatched, nested ones too | {totals['operations']} |",
        f"| autograd nodes | {totals['nodes']} |",
        f"| host time | {times['step'] / 1e3:.1f} ms |",
        f"| one block, forward | {times['block_forward']:.0f} us |",
        f"| one block, backward | {times['block_backward']:.0f} us |",
    ]
    for name, values in counts.items():
        shown = sorted(values.items(), key=lambda item: -item[1])[:SHOWN]
        lines += ["", f"Most frequent {name}: " + ", ".join(f"{n} {i}" for n, i in shown) + "."]
    return lines


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="result without suffix")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    grids.launch = attention.launch = count_launch
    grids.WHOLE = WHOLE
    model = pale.create_model("pale_tiny", num_classes=10, drop_path_rate=0.1, **CONFIG).train()
    x = torch.randn(1, 3, 32, 32)
    for _ in range(3):
        step(model, x)
    times = measure(model, x, options.rounds)
    counts = count(model, x)
    about = environment(World(torch.device("cpu")))
    lines = table(about, counts, times, options.rounds)
    print("\n".join(lines))
    if options.output is not None:
        data = {"about": about, "note": NOTE, "microseconds": times, "counts": counts}
        options.output.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
        options.output.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
