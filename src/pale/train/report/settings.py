"""Settings that differ from the recipe of the package, or between runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from ...recipes.schema import Recipe

NOT_SETTINGS = ("name", "about", "reported", "required")  # without influence on a run
MISSING = "(none)"  # recipes of different tasks have different settings


def flat_settings(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the settings of a recipe by dotted name."""
    for name, value in values.items():
        if not prefix and name in NOT_SETTINGS:
            continue
        if isinstance(value, dict) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def different_settings(recipes: Sequence[Recipe]) -> dict[str, list[str]]:
    """Return the settings in which recipes differ, by dotted name: the value of each recipe as text."""
    found = [dict(flat_settings(recipe.plain())) for recipe in recipes]
    names = dict.fromkeys(name for each in found for name in each)
    shown = {name: [_shown(each, name) for each in found] for name in names}
    return {name: values for name, values in shown.items() if len(set(values)) > 1}


def _shown(values: Mapping[str, object], name: str) -> str:
    if name not in values:
        return MISSING
    value = values[name]
    return value if isinstance(value, str) else json.dumps(value)
