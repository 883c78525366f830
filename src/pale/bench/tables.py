"""Results of the benchmarks as lines and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..core.console import Table


def describe_models(report: dict[str, Any], first: str) -> Iterator[str | Table]:
    """Yield the lines and the table of `bench.models.bench`; `first` is the model that others are compared with."""
    columns = ("task", "mode", "batch", "model", "images/s", "ms (quartiles)")
    table = Table(*columns, "first / this", "peak", "of matrix")
    for row in report["rows"]:
        if row["model"] == first and table.row_count:
            table.add_section()
        cells = [row["task"], row["mode"], str(row["batch"]), row["model"]]
        if row["error"]:
            table.add_row(*cells, "failed, see below")
            continue
        low, high = row["quartiles"]
        table.add_row(
            *cells,
            f"{row['images_per_s']:.1f}",
            f"{row['ms']:.2f} ({low:.2f} to {high:.2f})",
            _format(row["ratio"], "{:.2f}"),
            _format(row["peak_bytes"] and row["peak_bytes"] / 2**20, "{:.0f} MiB"),
            _format(row["matrix_share"], "{:.1%}"),
        )
    yield from _frame(report, table)


def describe_op(report: dict[str, Any]) -> Iterator[str | Table]:
    """Yield the lines and the table of `bench.op.bench_op`."""
    columns = ("part", "pass", "stage", "map", "ms", "plain / fused", "MB at least", "of copy")
    table, last = Table(*columns), None
    for row in report["rows"]:
        group = (row["piece"], row["passes"])
        if last not in (None, group):
            table.add_section()
        last = group
        times = [f"{name} {ms:.4f}" for name, ms in row["ms"].items()]
        table.add_row(
            *group,
            str(row["stage"]),
            "x".join(map(str, row["map"])),
            ", ".join(times + [f"{name} failed" for name in row["errors"]]),
            _format(row["ratio"], "{:.2f}"),
            f"{row['bytes'] / 1e6:.1f}",
            _format(row["copy_share"], "{:.1%}"),
        )
    yield from _frame(report, table)
    for name, mean in report["means"].items():
        yield f"{name}: {mean:.2f} times as fast as the best plain version (geometric mean)"
    if report["note"]:
        yield report["note"]


def describe_data(found: dict[str, Any]) -> str:
    """Return the result of `bench.data.measure` as a line."""
    return (
        f"{found['images_per_s']:.0f} images/s with {found['workers']} workers, "
        f"{found['worker_ms']:.2f} ms of worker time per image "
        f"({found['images']} images in {found['seconds']:.1f} s, batch {found['batch']})"
    )


def list_errors(report: dict[str, Any]) -> Iterator[str]:
    """Yield each measurement that failed, with the reason."""
    for row in report["rows"]:
        if "piece" in row:
            for name, error in row["errors"].items():
                yield f"{row['piece']}, stage {row['stage']}, {name}: {error}"
        elif row["error"]:
            yield f"{row['model']}, {row['task']}, {row['mode']}: {row['error']}"


def _frame(report: dict[str, Any], table: Table) -> Iterator[str | Table]:
    """Yield the table between the machine and its measured limits."""
    about, limits = report["about"], report["ceilings"]
    h, w = about["setting"]["size"]
    packages = f"torch {about['packages']['torch']}, timm {about['packages']['timm']}"
    yield f"{about['hardware']}, {about['setting']['dtype']}, {h}x{w}, {packages}"
    yield table
    yield (
        f"Measured limits of the hardware: matrix product {limits['matrix'] / 1e12:.3g} TFLOP/s, "
        f"copy {limits['copy'] / 1e9:.3g} GB/s read and written."
    )
    if report["warning"]:
        yield f"Warning: {report['warning']}"


def _format(value: object, form: str) -> str:
    return "-" if value is None else form.format(value)
