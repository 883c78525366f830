"""Files of benchmark reports: JSON and bar charts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ..view.drawing import FAINT, INK, check_image_suffix, draw_text
from ..view.figures import DIRECTION_TINTS


@dataclass(frozen=True)
class Bar:
    """One bar; the bars of a group share a scale."""

    group: str
    label: str
    value: float
    note: str
    ours: bool = False


def bars(report: dict[str, Any]) -> list[Bar]:
    """Return a bar for each measured time: images per second of `bench`, ms of each version of `bench_op`."""
    lines = []
    for row in report["rows"]:
        if "piece" in row:
            group = f"{row['piece']}, stage {row['stage']}, {row['passes']}, ms"
            group += f" (plain / fused: {row['ratio']:.2f})" if row["ratio"] else ""
            for name, ms in row["ms"].items():
                lines.append(Bar(group, name, ms, f"{ms:.4g}", name == "fused"))
        elif row["ms"]:
            group = f"{row['task']}, {row['mode']}, batch {row['batch']}, images/s"
            ours = row["model"] == report["rows"][0]["model"]
            note = f"{row['images_per_s']:.1f}"
            note += f"   (ours / it: {row['ratio']:.2f})" if row["ratio"] and not ours else ""
            lines.append(Bar(group, row["model"], row["images_per_s"], note, ours))
    return lines


def save_json(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def save_plot(report: dict[str, Any], path: str | Path) -> None:
    """Write a report as a bar chart; the suffix of the file gives the format."""
    check_image_suffix(path)
    path, lines, facts = Path(path), bars(report), report["about"]
    groups = list(dict.fromkeys(line.group for line in lines))
    image = Image.new("RGB", (1400, 130 + 50 * len(groups) + 38 * len(lines)), "white")
    h, w = facts["setting"]["size"]
    title = f"{facts['hardware']}, {facts['setting']['dtype']}, {h}x{w}"
    versions = f"torch {facts['packages']['torch']}, timm {facts['packages']['timm']}"
    versions += f", pale {facts['pale']} {facts['commit'] or ''}"
    draw_text(image, 40, 30, 30, INK, ("", title))
    draw_text(image, 40, 76, 20, FAINT, ("", versions))
    y = 120
    for group in groups:
        draw_text(image, 40, y + 12, 22, INK, ("", group))
        y += 50
        members = [line for line in lines if line.group == group]
        for line in members:
            draw_text(image, 60, y + 6, 20, INK, ("", line.label))
            width = round(560 * line.value / max(m.value for m in members))
            image.paste(DIRECTION_TINTS[not line.ours], (480, y, 480 + max(1, width), y + 28))
            draw_text(image, 490 + width, y + 6, 20, INK, ("", line.note))
            y += 38
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
