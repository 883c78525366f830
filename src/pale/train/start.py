"""Choose the recipe and the folder of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .. import recipes
from ..errors import RunError, SettingsError
from ..recipes.files import read_recipe
from ..recipes.schema import Recipe
from . import finetuning
from .distributed import World
from .resuming import is_restart
from .settings import RunSettings

INITIAL_WEIGHTS = ("model.weights", "model.init", "model.new_head")


def choose_recipe(
    settings: RunSettings, changes: Mapping[str, object], notes: list[str] | None = None
) -> Recipe:
    """Return the recipe of a run, with settings changed under dotted names.

    Args:
        settings: options of `pale train`.
        changes: settings of the recipe, by dotted name.
        notes: lines about what was chosen for the user are added.
    """
    resume, config = settings.resume, settings.config
    given = [word for word in (settings.recipe, config, resume) if word is not None]
    if len(given) != 1:
        raise SettingsError(
            f"give either a recipe, --config FILE or --resume RUN, got {len(given)} of them; "
            "`pale recipes` lists the recipes, `pale train finetune --data.root DIR` suits most own data"
        )
    if resume is None and settings.allow_changed_data:
        raise SettingsError(
            "--allow-changed-data needs --resume RUN; a new run has no earlier data"
        )
    if resume is not None:
        config = resume / "recipe.yaml"
        if not config.is_file():
            raise RunError(f"{resume} is not a run: it holds no recipe.yaml")
        _require_no_weights(settings.init, changes)
    if settings.recipe == finetuning.NAME:
        recipe, chosen = finetuning.plan_finetuning(settings, changes)
        notes = [] if notes is None else notes
        notes += chosen
    else:
        recipe = read_recipe(config) if config is not None else recipes.get(str(settings.recipe))
    if settings.init is not None:
        recipe = recipe.started_from(settings.init)
    return recipe.changed(changes)


def _require_no_weights(init: Path | None, changes: Mapping[str, object]) -> None:
    """Refuse initial weights for a resumed run: the checkpoint would replace them."""
    given = [*["init"] * (init is not None), *(n for n in INITIAL_WEIGHTS if n in changes)]
    if given:
        raise SettingsError(
            f"--{given[0]} applies to a new run only; a resumed run continues with its own weights"
        )


def choose_folder(settings: RunSettings, name: str, world: World) -> tuple[Path, bool]:
    """Return the folder of a run, and whether to resume: also if torchrun has restarted the command."""
    if settings.resume is not None:
        return settings.resume, True
    folder = settings.output or world.broadcast(free_folder(Path("runs") / name))
    resume = is_restart(folder, world)
    if not resume and world.broadcast((folder / "log.jsonl").exists()):
        raise RunError(
            f"{folder} already holds a run; resume it: pale train --resume {folder}, "
            "or choose another folder: --output DIR"
        )
    return folder, resume


def free_folder(path: Path) -> Path:
    """Return the path, with a number if it exists already: runs/x-2."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
