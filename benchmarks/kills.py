"""Kill training runs and compare the resumed ones, bit for bit, with runs that were left alone.

    python benchmarks/kills.py --kills 100 -o benchmarks/results/kills

Small recipes of the three tasks, each with one process and with two (gloo), on the CPU. Every kill is a SIGKILL of a
live run, at a random time or inside the writing of a checkpoint; a run is killed up to three times before it may end.
Weights, moving average, moments, losses, learning rates and figures must be equal to the bit. Writes OUT.json and
OUT.md.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from train.kills import kill

from pale.train.distributed import World
from pale.train.environment import environment

TASKS = ("classification", "segmentation", "detection")


def measure(task: str, processes: int, kills: int, seed: int, folder: Path) -> dict:
    """Return a row of the table."""
    began = time.monotonic()
    options = ("--seed", seed, "--kills", kills, "--processes", processes)
    made, compared = kill(folder / f"{task}{processes}", task, *options)
    hits = [entry for entry in made if entry["died"]]
    return {
        "task": task,
        "processes": processes,
        "seed": seed,
        "kills": len(hits),
        "before_first_checkpoint": sum(not entry["checkpoints"] for entry in hits),
        "inside_a_write": sum(bool(entry["writing"]) or entry["way"] == "fsync" for entry in hits),
        "runs": len(compared),
        "tensors": compared[0]["tensors"],
        "bit_equal": sum(not entry["differ"] for entry in compared),
        "differ": [entry for entry in compared if entry["differ"]],
        "seconds": round(time.monotonic() - began),
    }


def table(rows: list[dict], about: dict) -> str:
    """Return the results as Markdown."""
    names = ("kills", "before_first_checkpoint", "inside_a_write", "runs", "bit_equal")
    totals = [sum(row[name] for row in rows) for name in names]
    lines = [
        "# Kill test",
        "",
        "SIGKILLs of live training runs; each run is resumed until it ends and compared, bit for bit (weights, moving",
        "average, moments, losses, learning rates, figures), with the run that was left alone.",
        "",
        "| task | processes | kills | before the first checkpoint | inside a write | runs | bit-equal runs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row["task"], row["processes"], *(row[name] for name in names)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines.append("| all | | " + " | ".join(map(str, totals)) + " |")
    facts = about["environment"]
    lines += [
        "",
        f"`{about['command']}`, {about['date']}, {about['seconds']} s; pale {facts['pale']}, commit {facts['commit']}, "
        f"torch {facts['torch']}, timm {facts['timm']}, Python {facts['python']}, CPU.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="of all tasks together")
    parser.add_argument("--seed", type=int, default=0, help="of the times of the kills")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/kills"))
    args = parser.parse_args()
    began = time.monotonic()
    kinds = [(task, processes) for task in TASKS for processes in (1, 2)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="kills") as folder:
        for i, (task, processes) in enumerate(kinds):
            share = args.kills // len(kinds) + (i < args.kills % len(kinds))
            rows.append(measure(task, processes, share, args.seed + i, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - began),
        "environment": environment(World(torch.device("cpu"))),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(about | {"rows": rows}, indent=1)
    args.output.with_suffix(".json").write_text(content + "\n")
    args.output.with_suffix(".md").write_text(table(rows, about))
    good = all(row["bit_equal"] == row["runs"] for row in rows)
    return 0 if good and sum(row["kills"] for row in rows) == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
