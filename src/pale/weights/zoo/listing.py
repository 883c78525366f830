"""The list of weights as lines and a table. PyTorch is not imported, so that `pale weights` answers at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ...core.console import Table
from .index import ZooEntry


def describe_weights(entries: Sequence[ZooEntry], folder: Path) -> Iterator[str | Table]:
    """Yield task, model, size and figure of each entry of the zoo in a folder."""
    if not entries:
        yield f"{folder} holds no weights yet: make them with benchmarks/demo_weights.py (docs/weights.md)"
        return
    table = Table("name", "task", "model", "classes")
    for column in ("M params", "MB", "figure, %", "images"):
        table.add_column(column, justify="right")
    table.add_column("licence")
    for entry in entries:
        table.add_row(
            entry.name,
            entry.task,
            entry.timm_name or entry.model,
            str(entry.classes),
            f"{entry.params / 1e6:.2f}",
            f"{entry.bytes / 1e6:.2f}",
            entry.headline,
            f"{entry.figures.get('images', 0):.0f}",
            entry.license or "-",
        )
    yield table
    total = sum(entry.bytes for entry in entries) / 1e6
    yield (
        f"{total:.2f} MB in {folder}; "
        "pale weights show NAME prints a card: data, recipe, peers, limits, licence"
    )
    tagged = sorted((e for e in entries if e.timm_name), key=lambda e: not e.timm.get("default"))
    if tagged:
        name = tagged[0].timm_name
        yield f"in Python, after import pale: timm.create_model('{name}', pretrained=True)"
