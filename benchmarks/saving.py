"""Measure how long training waits for a checkpoint: written at once, and in the background.

    python benchmarks/saving.py -o benchmarks/results/saving_cpu

Pale-T with AdamW and a moving average (the state of an ImageNet run), on the CPU. Every step is a matrix product of
fixed size instead of a training step, so that the table shows the wait alone; the disk is the one of --folder. A second
pair of rows adds a delay to every fsync, as on a busy network file system. Writes OUT.json and OUT.md.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

import pale
from pale.train import checkpoint
from pale.train.background import BackgroundWriter, copy_to_cpu
from pale.train.distributed import World
from pale.train.environment import environment


def make_state() -> tuple[dict, dict]:
    """Return the models and the optimizer state of a run of Pale-T after a step."""
    model = pale.create_model("pale_tiny")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights = model.state_dict()
    return {"model": weights, "ema": copy_to_cpu(weights)}, {"optimizer": optimizer.state_dict()}


def measure(
    folder: Path, background: bool, saves: int, work: float, state: tuple[dict, dict]
) -> dict:
    """Return the waits of several checkpoints with `work` seconds of computation between two."""
    models, trainer = state
    writer, waits, written = BackgroundWriter(0), [], []
    left, right = torch.rand(256, 256), torch.rand(256, 256)
    for step in range(1, saves + 1):
        began = time.perf_counter()
        copied = copy_to_cpu((models, trainer)) if background else (models, trainer)

        def write(step: int = step, copied: tuple[dict, dict] = copied) -> None:
            start = time.perf_counter()
            checkpoint.save(folder, step, copied[0], copied[1] | {"step": step}, {})
            checkpoint.prune(folder, 1, step)
            written.append(time.perf_counter() - start)

        writer.submit("the checkpoint", write)
        if not background:
            writer.wait()
        waits.append(time.perf_counter() - began)
        end = time.perf_counter() + work
        while time.perf_counter() < end:
            left @ right
    writer.wait()
    return {
        "background": background,
        "wait_s": statistics.median(waits),
        "longest_wait_s": max(waits),
        "write_s": statistics.median(written),
    }


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="result without suffix")
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written; default: a temporary folder"
    )
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of computation between two checkpoints"
    )
    parser.add_argument(
        "--delay", type=float, default=1.0, help="seconds of each fsync in the second pair of rows"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    state = make_state()
    size = sum(t.numel() * 4 for t in state[0]["model"].values()) * 4
    rows, sync = [], os.fsync
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for delay in (0.0, options.delay):

            def slow(descriptor: int, delay: float = delay) -> None:
                time.sleep(delay)
                sync(descriptor)

            for background in (False, True):
                folder = Path(name) / f"{background}{delay}"
                work = options.seconds + 8 * delay
                with mock.patch("os.fsync", slow):
                    found = measure(folder, background, options.saves, work, state)
                rows.append({"fsync_delay_s": delay} | found)
    about = environment(World(torch.device("cpu")))
    options.output.with_suffix(".json").write_text(
        json.dumps({"about": about, "rows": rows}, indent=1) + "\n"
    )
    lines = [
        "# Waiting for checkpoints",
        "",
        f"Pale-T with AdamW and a moving average, {size / 1e6:.0f} MB; medians of {options.saves} checkpoints. "
        f"{about['device']}, {about['threads']} threads, torch {about['torch']}, commit {about['commit'][:7]}; "
        f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores.",
        f"`python benchmarks/saving.py -o OUT --seconds {options.seconds:g} --saves {options.saves}`",
        "",
        "| delay of each fsync | written | training waits | longest wait | writing takes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        how = "in the background" if row["background"] else "at once"
        lines.append(
            f"| {row['fsync_delay_s']:g} s | {how} | {row['wait_s']:.2f} s | {row['longest_wait_s']:.2f} s "
            f"| {row['write_s']:.2f} s |"
        )
    options.output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
