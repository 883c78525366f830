"""Read and write recipes as YAML. A recipe file may come from anyone, so its size and structure are bounded."""

from __future__ import annotations

from pathlib import Path

import yaml

from ..core.plain_yaml import load_yaml
from ..errors import SettingsError
from ..tasks import DEFAULT_TASK
from .kinds import KINDS
from .schema import Recipe

MAX_BYTES = 1 << 19  # maximum size of a recipe file


def parse_recipe(values: object, source: str) -> Recipe:
    """Build a recipe from plain values.

    Args:
        values: names and values, as read from YAML or JSON.
        source: where they come from, for error messages.
    """
    if not isinstance(values, dict):
        raise SettingsError(f"{source} is not a recipe: expected names and values")
    kind = values.get("kind", DEFAULT_TASK)
    if not isinstance(kind, str) or kind not in KINDS:
        raise SettingsError(f"{source}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return KINDS[kind].parse(values)


class _Dumper(yaml.SafeDumper):
    """YAML dumper without aliases, which `load_yaml` refuses."""

    def ignore_aliases(self, data: object) -> bool:
        """Write every value in full."""
        return True


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a YAML file, such as recipe.yaml of a run."""
    if not path.is_file():
        raise SettingsError(f"there is no recipe file {path}")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise SettingsError(f"{path} is not a recipe: it has more than {MAX_BYTES} bytes")
    try:
        values = load_yaml(content)
    except ValueError as error:
        raise SettingsError(f"{path} is not YAML: {error}") from None
    return parse_recipe(values, str(path))


def recipe_to_yaml(recipe: Recipe) -> str:
    """Return a recipe as YAML."""
    return yaml.dump(recipe.plain(), Dumper=_Dumper, sort_keys=False, width=100)
