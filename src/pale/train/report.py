"""report.html of a run: one file with curves, confusion, the worst mistakes as pictures, recipe and environment."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from ..recipes.schema import Recipe, read, text
from . import log
from .checkpoint import write_file

MOST_CLASSES = 60  # a larger confusion matrix is not drawn, only its worst pairs
PICTURE = 112  # pixels
PANEL = 900  # pixels of several pictures side by side
SCORES = (
    "top1",
    "top5",
    "miou",
    "macc",
    "aacc",
    "box_ap",
    "box_ap50",
    "mask_ap",
    "mask_ap50",
)  # figures of which the best is told
CURVES = {"top1": "top-1", "miou": "mIoU", "box_ap": "box AP", "mask_ap": "mask AP"}
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse}td,th{padding:.2rem .6rem;text-align:left;border-bottom:1px solid #ddd}
.grid{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0}figcaption{font-size:.8rem;max-width:8.5rem}
svg{background:#fafafa;border:1px solid #ddd}pre{background:#f5f5f5;padding:1rem;overflow:auto;font-size:.8rem}
"""


def write(run: Path) -> Path:
    """Write the report of a run, finished or not, and say where."""
    if not (run / "recipe.yaml").is_file():
        raise ValueError(f"{run} is no run: it holds no recipe.yaml")
    recipe, events = read(run / "recipe.yaml"), log.read(run / "log.jsonl")
    details: dict[str, Any] = {}
    if (run / "evaluation.json").is_file():
        details = json.loads((run / "evaluation.json").read_text())
    parts = [
        f"<h1>{escape(recipe.name)}</h1><p>{escape(recipe.about)} Folder: {escape(run.name)}.</p>",
        _result(recipe, events),
        _curves(events),
        _confusion(details),
        _per_class(details),
        _mistakes(details, recipe),
        _gallery(details, recipe),
        _environment(events),
        f"<h2>Recipe</h2><pre>{escape(text(recipe))}</pre>",
    ]
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(recipe.name)}</title>"
        f"<style>{STYLE}</style>{''.join(parts)}</html>\n"
    )
    path = run / "report.html"
    write_file(path, lambda temporary: _put(temporary, page))
    return path


def _of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _result(recipe: Recipe, events: list[dict[str, Any]]) -> str:
    evaluations, steps = _of(events, "eval"), _of(events, "step")
    start = _of(events, "start")
    done = f"{steps[-1]['step'] if steps else 0} of {start[-1]['steps'] if start else '?'} steps"
    rows = [f"<tr><td>done<td>{done}<td>"]
    if skipped := _of(events, "skipped"):
        note = "loss or gradient was no number; log.jsonl names the samples"
        rows.append(f"<tr><td>skipped<td>{len(skipped)} steps<td>{note}")
    reported = recipe.reported.plain() if recipe.reported else {}
    for name, value in (evaluations[-1] if evaluations else {}).items():
        if name not in ("event", "step", "epoch"):
            paper = reported.get(name)
            known = [e[name] for e in evaluations if _is_number(e.get(name))]
            best = max(known) if known and name in SCORES else None
            note = "" if best is None else f"best {best:.2f}"
            note += "" if paper is None else f", the paper {paper:g}"
            told = f"{value:.4g}" if _is_number(value) else "no number"
            rows.append(f"<tr><td>{escape(name)}<td>{told}<td>{note}")
    if not evaluations:
        rows.append("<tr><td>not evaluated yet<td><td>")
    return f"<h2>Result</h2><table>{''.join(rows)}</table>"


def _curves(events: list[dict[str, Any]]) -> str:
    steps, evaluations = _of(events, "step"), _of(events, "eval")
    drawn = [
        ("training loss", [(e["step"], e["loss"]) for e in steps]),
        *(
            (f"validation {label}, %", [(e["step"], e[name]) for e in evaluations if name in e])
            for name, label in CURVES.items()
        ),
        ("learning rate", [(e["step"], e["lr"]) for e in steps]),
        ("images/s", [(e["step"], e["images_per_s"]) for e in steps]),
        ("share of time waiting for data", [(e["step"], e["data_wait"]) for e in steps]),
    ]
    drawn = [(name, [p for p in points if _is_number(p[1])]) for name, points in drawn]
    figures = "".join(curve(name, points) for name, points in drawn if points)
    return f"<h2>Curves</h2><div class=grid>{figures}</div>" if figures else ""


def curve(name: str, points: Sequence[tuple[float, float]], w: int = 300, h: int = 160) -> str:
    """A line over the steps as SVG; a single point is a dot."""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)

    def place(x: float, y: float) -> str:
        px = 6 + (w - 12) * ((x - left) / (right - left) if right > left else 0.5)
        py = h - 6 - (h - 12) * ((y - low) / (high - low) if high > low else 0.5)
        return f"{px:.1f},{py:.1f}"

    step = max(1, len(points) // 600)
    path = " ".join(place(x, y) for x, y in [*points[::step], points[-1]])
    cx, _, cy = place(*points[-1]).partition(",")
    return (
        f"<figure><svg width={w} height={h}><polyline fill=none stroke=#0a6 stroke-width=1.5 points='{path}'/>"
        f"<circle cx={cx} cy={cy} r=3 fill=#0a6 /></svg><figcaption style='max-width:{w}px'>{escape(name)}: "
        f"{low:.4g} to {high:.4g}, last {ys[-1]:.4g}; steps {left:g} to {right:g}</figcaption></figure>"
    )


def _confusion(details: dict[str, Any]) -> str:
    if "confusion" not in details:
        return ""
    matrix, classes = details["confusion"], details["classes"]
    n = len(classes)
    pairs = sorted(
        ((matrix[i][j], classes[i], classes[j]) for i in range(n) for j in range(n) if i != j),
        reverse=True,
    )
    worst = "".join(
        f"<tr><td>{escape(label)}<td>{escape(guess)}<td>{count}"
        for count, label, guess in pairs[:10]
        if count
    )
    table = (
        f"<table><tr><th>is<th>taken for<th>times{worst}</table>" if worst else "<p>No mistake.</p>"
    )
    picture = ""
    if n <= MOST_CLASSES:
        cells = []
        for i, row in enumerate(matrix):
            for j, count in enumerate(row):
                share = count / max(1, sum(row))
                title = f"{classes[i]} taken for {classes[j]}: {count}"
                cells.append(
                    f"<rect x={12 * j} y={12 * i} width=12 height=12 fill=#06c fill-opacity={share:.3f}>"
                    f"<title>{escape(title)}</title></rect>"
                )
        picture = (
            f"<figure><svg width={12 * n} height={12 * n}>{''.join(cells)}</svg>"
            "<figcaption>a row is what it is, a column what it was taken for</figcaption></figure>"
        )
    return f"<h2>Confusion</h2><div class=grid>{picture}{table}</div>"


def _mistakes(details: dict[str, Any], recipe: Recipe) -> str:
    if not details.get("mistakes"):
        return ""
    classes = details["classes"]
    try:
        task = recipe.task(classes)
        figures = []
        for loss, index, label, guess in details["mistakes"]:
            caption = f"{classes[label]}, taken for {classes[guess]} (loss {loss:.1f})"
            figures.append(
                f"<figure><img alt='{escape(caption)}' src='{_embedded(task.val_picture(index))}'>"
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )
        body = f"<div class=grid>{''.join(figures)}</div>"
    except ValueError as error:  # the data may have been moved since
        body = f"<p>The pictures cannot be shown: {escape(str(error))}.</p>"
    return f"<h2>Worst mistakes</h2>{body}"


def _per_class(details: dict[str, Any]) -> str:
    rows = details.get("per_class")
    if not rows:
        return ""
    names = [name for name in rows[0] if name != "class"]
    head = "".join(f"<th>{escape(name)}" for name in ("class", *names))
    body = "".join(
        f"<tr><td>{escape(row['class'])}"
        + "".join("<td>-" if row[name] is None else f"<td>{row[name]:.1f}" for name in names)
        for row in rows
    )
    return f"<h2>Classes, %</h2><table><tr>{head}{body}</table>"


def _gallery(details: dict[str, Any], recipe: Recipe) -> str:
    """The best and the worst images, drawn by the task."""
    if not details.get("gallery"):
        return ""
    entries = details["gallery"]
    try:
        task: Any = recipe.task(details["classes"])
        figures = []
        for entry in entries:
            told = ", ".join(
                f"{name} {value:.1f}" for name, value in entry.items() if isinstance(value, float)
            )
            caption = f"{Path(task.val_name(entry['index'])).name}: {told}"
            figures.append(
                f"<figure><img style='max-width:100%' alt='{escape(caption)}' "
                f"src='{_embedded(task.panel(entry), PANEL)}'>"
                f"<figcaption style='max-width:none'>{escape(caption)}</figcaption></figure>"
            )
        body = "".join(figures)
    except ValueError as error:  # the data may have been moved since
        body = f"<p>The pictures cannot be shown: {escape(str(error))}.</p>"
    return (
        "<h2>From best to worst</h2><p>Image, labels, prediction; the best of the validation set, "
        f"then the worst.</p>{body}"
    )


def _embedded(picture: Image.Image, side: int = PICTURE) -> str:
    picture = picture.copy()
    picture.thumbnail((side, side))
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


def _environment(events: list[dict[str, Any]]) -> str:
    starts = _of(events, "start")
    if not starts:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}<td>{escape(str(value))}"
        for name, value in starts[-1].items()
        if name not in ("event", "step", "steps")
    )
    return f"<h2>Environment</h2><table>{rows}</table><p>Started {len(starts)} times.</p>"


def _put(path: Path, page: str) -> None:
    path.write_text(page, encoding="utf-8")
