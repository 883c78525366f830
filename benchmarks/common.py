"""What the scripts here share: runs that are made once, and what is read from them."""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from pale.train.distributed import join
from pale.train.environment import environment
from pale.train.log import read

COLOURS = ["#0a7", "#c50", "#37c", "#a3a", "#888", "#970", "#0aa", "#c07", "#000"]


def pale(*words: object) -> None:
    print("+ pale", *words, flush=True)
    subprocess.run([sys.executable, "-m", "pale", *map(str, words)], check=True)


def done(run: Path) -> bool:
    return any(event["event"] == "end" for event in read(run / "log.jsonl"))


def trained(run: Path, *words: object) -> Path:
    """Train, or go on, or leave as it is."""
    if done(run):
        return run
    if list((run / "checkpoints").glob("step_*")):
        pale("train", "--resume", run)
    else:
        shutil.rmtree(run, ignore_errors=True)
        pale("train", *words, "--output", run)
    return run


def summary(run: Path) -> dict:
    """The last evaluation, and how the run went."""
    events = read(run / "log.jsonl")
    start, steps, evals = (
        [e for e in events if e["event"] == k] for k in ("start", "step", "eval")
    )
    return {
        "run": run.name,
        "val": evals[-1],
        "device": start[-1]["device"],
        "steps": steps[-1]["step"],
        "images_per_s": statistics.median(e["images_per_s"] for e in steps[len(steps) // 2 :]),
        "data_wait": statistics.median(e["data_wait"] for e in steps[len(steps) // 2 :]),
        "memory_mb": steps[-1]["memory_mb"],
    }


def losses(run: Path) -> list[tuple[int, float]]:
    """Steps and their training losses."""
    events = read(run / "log.jsonl")
    return [(e["step"], e["loss"]) for e in events if e["event"] == "step"]


def about(args: argparse.Namespace) -> dict:
    """Versions, commit, hardware, and the arguments."""
    with join() as world:
        return {
            "environment": environment(world),
            "arguments": {name: str(value) for name, value in vars(args).items()},
        }


def mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def curves(out: Path, rows: list[dict], path: Path) -> None:
    """Training loss of every run over its steps, one panel a task."""
    w, h, tasks = 560, 320, sorted({row["task"] for row in rows})
    models = list(dict.fromkeys(row["model"] for row in rows))
    colours = {model: COLOURS[i % len(COLOURS)] for i, model in enumerate(models)}
    canvas = Image.new("RGB", (w * len(tasks), h), "white")
    draw = ImageDraw.Draw(canvas)
    for i, task in enumerate(tasks):
        left, lines = i * w, []
        for row in (r for r in rows if r["task"] == task):
            steps = losses(out / row["run"])
            size = max(1, len(steps) // 60)
            pieces = [steps[k : k + size] for k in range(0, len(steps), size)]
            points = [(p[-1][0], statistics.mean(loss for _, loss in p)) for p in pieces]
            lines.append((row["model"], points))
        top = max(y for _, points in lines for _, y in points[1:] or points)
        end = max(points[-1][0] for _, points in lines)
        draw.rectangle((left + 40, 24, left + w - 12, h - 28), outline="#bbb")
        title = f"{task}: training loss, 0 to {top:.2f}, over {end} steps"
        draw.text((left + 44, 6), title, fill="black")
        for k, model in enumerate(dict.fromkeys(model for model, _ in lines)):
            draw.text((left + w - 140, 30 + 14 * k), model, fill=colours[model])
        for model, points in lines:
            place = [
                (left + 40 + (w - 52) * x / end, h - 28 - (h - 52) * min(y, top) / top)
                for x, y in points
            ]
            draw.line(place, fill=colours[model], width=2)
    canvas.save(path)


def write(out: Path, name: str, args: argparse.Namespace, rows: list[dict], table: str) -> None:
    """The results so far, as JSON and as a table."""
    out.mkdir(parents=True, exist_ok=True)
    report = about(args) | {"rows": rows}
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / f"{name}.md").write_text(table)
