"""Recipes, model costs, stages and the state of the machine as lines and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..core.console import Table
from ..core.plain_json import Json
from ..data.sources.token_labels import TokenLabelManifest
from ..model.cost import Cost, Reproduced
from ..recipes.schema import Recipe


def describe_recipes(recipes: Mapping[str, Recipe]) -> Table:
    """Return the description, length and batch size of each recipe."""
    table = Table("recipe", "description", "length", "batch")
    for name, recipe in recipes.items():
        length = f"{recipe.epochs} epochs" if recipe.steps is None else f"{recipe.steps} steps"
        table.add_row(name, recipe.about, length, str(recipe.batch))
    return table


def describe_token_labels(made: TokenLabelManifest, output: Path) -> Iterator[str]:
    """Yield lines about the written token labels, and a command that trains with them."""
    if made.agreement is None:
        yield f"{output}: other parts are not written yet"
        return
    h, w = made.grid
    yield (
        f"{output}: {made.pictures} images, {h}x{w} positions, {made.k} classes each; the label of the "  # kept name
        f"image ranks first in {made.agreement:.1f} %"
    )
    yield (
        f"train with: pale train RECIPE --token_labels.store {output} and the same --data options; "
        "RECIPE is imagenet.pale_t_star for ImageNet, small_data.pale_t_star for a small dataset"
    )


def describe_cost(title: str, stages: int, ways: Mapping[str, Cost]) -> Table:
    """Return parameters and multiply-adds of each stage, counted in several ways."""
    columns = ("", "params", "G, padded as in the paper", "G, ideal", "G, executed (sdpa)")
    table = Table(*columns, title=title)
    for prefix in [*(f"stages.{i}." for i in range(stages)), "norm", "head"]:
        macs = [f"{total.under(prefix).macs / 1e9:.3f}" for total in ways.values()]
        params = ways["ideal"].under(prefix).params
        table.add_row(prefix.strip("."), f"{params:,}", *macs)
    table.add_section()
    macs = [f"{total.macs / 1e9:.3f}" for total in ways.values()]
    table.add_row("total", f"{ways['ideal'].params:,}", *macs)
    return table


def describe_paper(rows: Sequence[Reproduced]) -> Iterator[str | Table]:
    """Yield the Pale rows of the paper's tables beside the counts of this package."""
    columns = ("", "row", "task", "params [paper]", "G multiply-adds [paper]", "difference")
    table = Table(*columns, "not padded", title="Pale rows")
    last = None
    for row in rows:
        if last not in (None, row.table):
            table.add_section()
        table.add_row(
            row.table if row.table != last else "",
            row.setting,
            row.task,
            f"{row.params:.1f} M [{row.params_paper:g}]",
            f"{row.macs:.3f} [{row.macs_paper:g}]",
            f"{row.difference:+.1%}",
            f"{row.macs_ideal:.3f}",
        )
        last = row.table
    yield table
    yield (
        "Counted with the paper's padding: imagenet at 224x224, ade20k with UperNet at 512x2048, coco with "
        "Mask R-CNN at 800x1280. 'not padded' is the cost in this package, which never pads groups."
    )


def describe_stages(about: Json) -> Iterator[str | Table]:
    """Yield the stages of a model, from `tools.info.describe`."""
    h, w = about["size"]
    mode = f"attention {about['attention']}, position {about['position']}"
    columns = ("stage", "map", "blocks", "channels", "heads", "pale", "groups")
    more = ("tokens/group", "params", "G multiply-adds", "padding", "kept (bf16)")
    table = Table(*columns, *more, title=f"{about['model']}, {h}x{w}, {mode}")
    for stage in about["stages"]:
        low, high = stage["tokens"]
        table.add_row(
            str(stage["stage"]),
            "x".join(map(str, stage["map"])),
            *(str(stage[name]) for name in ("blocks", "channels", "heads", "pale_size")),
            " + ".join(f"{n} {kind}" for kind, n in stage["groups"].items()),
            str(low) if low == high else f"{low} to {high}",
            *_cost_cells(stage),
        )
    table.add_section()
    table.add_row("all", *[""] * 7, *_cost_cells(about["total"]))
    yield table
    yield (
        "Multiply-adds: ideal, for one image; norm and classifier in the last row only. "
        "Padding: additional multiply-adds of the sdpa back-end. "
        "Kept: activations stored for the backward pass of one image."
    )


def _cost_cells(part: Json) -> list[str]:
    return [
        f"{part['params'] / 1e6:.2f} M",
        f"{part['macs'] / 1e9:.3f}",
        f"{part['padding']:.1%}",
        f"{part['kept_bytes'] / 2**20:.1f} MiB",
    ]


def describe_machine(facts: Json) -> Iterator[str]:
    """Yield versions, devices and back-ends, from `tools.doctor.examine`."""
    yield f"pale {facts['pale']} on Python {facts['python']}, {facts['system']}"
    versions = facts["packages"].items()
    yield ", ".join(f"{name} {version or 'not installed'}" for name, version in versions)
    for device in facts["devices"]:
        state = "works" if device["works"] else "gives wrong numbers: please report it"
        yield f"{device['device']} ({device['about']}): back-end {device['backend']}, {state}"
        blocks = device["blocks"]
        if blocks != "fused kernels":
            blocks = f"plain PyTorch; not fused kernels: {blocks}"
        yield f"  blocks: {blocks}"
        for other, reason in device["others"].items():
            yield f"  not {other}: {reason}"
