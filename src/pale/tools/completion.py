"""Words for shell completion: recipes, models and settings."""

from __future__ import annotations

from ..core.settings import dotted_names
from ..model.pale_transformer import VARIANTS
from ..recipes import RECIPES
from ..recipes.kinds import KINDS


def argument_values() -> dict[str, list[str]]:
    """Return the values of arguments that are a recipe or a model, by the name of the argument."""
    return {"recipe": list(RECIPES), "name": list(RECIPES), "model": list(VARIANTS)}


def setting_options(prefix: str) -> list[str]:
    """Return every setting of a recipe whose dotted name starts with `prefix`, as an option."""
    names = dict.fromkeys(name for kind in KINDS.values() for name in dotted_names(kind))
    return [f"--{name}" for name in names if name.startswith(prefix)]
