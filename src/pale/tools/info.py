"""Architecture and cost of a model on an image of a given size, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import get_args

from ..core.plain_json import Json
from ..model.cost import Cost, Counting, count
from ..model.pale_transformer import PaleConfig
from ..ops.pale_attention.region import Region

ACTIVATION_BYTES = 2  # bf16
WAYS: tuple[Counting, ...] = get_args(Counting)


def count_in_all_ways(
    config: PaleConfig, size: tuple[int, int], in_chans: int = 3, num_classes: int = 1000
) -> dict[str, Cost]:
    """Return the cost padded as in the paper, ideal, and as executed."""
    return {
        way: count(config, size, counting=way, in_chans=in_chans, num_classes=num_classes)
        for way in WAYS
    }


def plain_costs(ways: Mapping[str, Cost]) -> Json:
    """Return costs and their totals as JSON values."""
    return {
        way: asdict(cost) | {"params": cost.params, "macs": cost.macs} for way, cost in ways.items()
    }


def describe(
    name: str, config: PaleConfig, size: tuple[int, int], in_chans: int = 3, num_classes: int = 1000
) -> Json:
    """Return maps, groups, tokens, parameters, multiply-adds and memory for JSON."""
    ideal = count(config, size, in_chans=in_chans, num_classes=num_classes)
    executed = count(config, size, counting="executed", in_chans=in_chans, num_classes=num_classes)
    stages = []
    for i, (h, w) in enumerate(config.maps(*size)):
        groups = _groups([config.region(i, j) for j in range(config.depths[i])], h, w)
        prefix = f"stages.{i}."
        stages.append(
            {
                "stage": i + 1,
                "map": (h, w),
                "blocks": config.depths[i],
                "channels": config.channels[i],
                "heads": config.heads[i],
                "pale_size": config.pale_sizes[i],
                "groups": {kind: len(sizes) for kind, sizes in groups.items()},
                "tokens": (min(map(min, groups.values())), max(map(max, groups.values()))),
                **_totals(ideal.under(prefix), executed.under(prefix)),
            }
        )
    return {
        "model": name,
        "attention": config.attention,
        "position": config.position,
        "size": size,
        "stages": stages,
        "total": _totals(ideal, executed),
    }


def _groups(regions: list[Region], h: int, w: int) -> dict[str, list[int]]:
    """Return the number of tokens of each row group, column group or pale that a block uses."""
    groups: dict[str, list[int]] = {}
    for region in regions:
        for kind in region.kinds:
            groups[kind] = region.members(kind, h, w).flatten(1).sum(1).tolist()
    return groups


def _totals(ideal: Cost, executed: Cost) -> dict[str, float]:
    return {
        "params": ideal.params,
        "macs": ideal.macs,
        "padding": executed.macs / ideal.macs - 1,
        "kept_bytes": ideal.kept * ACTIVATION_BYTES,
    }
