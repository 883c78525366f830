"""`pale train` without its output: choose recipe and folder, join the other processes, train."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .determinism import prepare_cublas
from .distributed import exit_process, join
from .loop import train
from .settings import RunSettings
from .start import choose_folder, choose_recipe


def run_training(
    settings: RunSettings,
    changes: Mapping[str, object],
    report: Callable[[dict[str, object]], None] | None,
) -> int:
    """Train; return 128 + the number of the signal that stopped it, or 0.

    Args:
        settings: settings of the command.
        changes: settings of the recipe by dotted name.
        report: called with the result on the main process, and nothing else is printed; None: print lines.
    """
    notes: list[str] = []
    recipe = choose_recipe(settings, changes, notes)
    if recipe.deterministic:
        prepare_cublas()  # before the process group is joined, which initialises CUDA
    with join(settings.device, settings.dist_timeout) as world:
        folder, resume = choose_folder(settings, recipe.name, world)
        outcome = train(
            recipe,
            folder,
            world,
            resume=resume,
            quiet=report is not None,
            allow_changed_data=settings.allow_changed_data,
            notes=notes,
        )
        if report is not None and world.main:
            about = {"run": str(folder), "step": outcome.step, "steps": outcome.steps}
            report(about | outcome.figures)
    if world.size > 1:
        exit_process(outcome.exit_code)
    return outcome.exit_code
