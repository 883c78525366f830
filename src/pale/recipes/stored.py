"""Find the recipe of weights, in their header or by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import WeightsError
from . import get
from .files import parse_recipe
from .schema import Recipe


def stored_recipe(
    about: Mapping[str, object], source: str | Path, name: str | None = None
) -> Recipe:
    """Return the recipe of weights.

    Args:
        about: the header of the weights.
        source: where they come from, for messages.
        name: name of a recipe, for weights without one in the header.
    """
    if name is not None:
        return get(name)
    if "recipe" not in about:
        raise WeightsError(
            f"{source} has no recipe in its header; give one, such as --recipe imagenet.pale_t"
        )
    return parse_recipe(about["recipe"], str(source))


def without_start(recipe: Recipe) -> Recipe:
    """Return the recipe without initial weights, because trained weights are loaded instead."""
    known = recipe.plain()["model"]
    starts = {"weights": None, "init": None, "new_head": False}
    return recipe.override(
        {f"model.{name}": value for name, value in starts.items() if name in known}
    )
