"""The result of an export as lines and a table."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.console import Table
from ..tasks import TASKS
from . import Exported


def describe_exported(done: Exported) -> Iterator[str | Table]:
    """Yield the differences from PyTorch, the speed, and the file."""
    table = Table("batch", "size", "largest difference", "of the largest logit")
    for name in ("PyTorch, ms", f"{done.format}, ms", "speed-up"):
        table.add_column(name, justify="right")
    for check in done.checks:
        b, h, w = check.size
        table.add_row(
            str(b),
            f"{h}x{w}",
            f"{check.difference:.2e}",
            f"{check.share:.1e}",
            f"{check.torch_ms:.1f}",
            f"{check.ms:.1f}",
            f"{check.torch_ms / check.ms:.2f}",
        )
    yield table
    if done.data is not None:
        count = done.data.pictures  # kept name
        line = f"{count} images: the same class on {done.data.agreement:.2f} % of the "
        line += TASKS[done.about["task"]].pipeline.counted
        if done.data.top1 is not None:
            line += f"; top-1 {done.data.top1_file:.2f} %, PyTorch {done.data.top1:.2f} %"
        yield line
    elif done.format == "int8":
        yield "int8 changes the logits; --data DIR measures the effect on the predicted classes"
    if not done.about["trained"]:
        yield "the weights are untrained"
    where = f" for {done.device}" if done.format == "aoti" else ""
    yield (
        f"{done.path} written: {done.format}{where}, {done.bytes / 1e6:.1f} MB, "
        f"{len(done.about['classes']) or 'unnamed'} classes"
    )
