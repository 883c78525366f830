"""Recipes: functions without arguments that return all settings of a run, typed and frozen.

`register_task` adds a task of another package: its class, its recipe class and its recipes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import ModuleType

from ..core.settings import vary
from ..errors import SettingsError
from ..tasks import TASKS
from ..tasks.base import Task
from . import (
    ablations,
    ade20k,
    camvid,
    coco,
    demo,
    finetune,
    imagenet,
    pets,
    pretrain,
    quickstart,
    small_boxes,
    small_data,
    small_masks,
)
from .kinds import KINDS
from .schema import Recipe


def _functions(module: ModuleType) -> dict[str, Callable[[], Recipe]]:
    group = module.__name__.rpartition(".")[2]
    return {
        name if name == group else f"{group}.{name}": function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
    }


RECIPES: dict[str, Callable[[], Recipe]] = {
    name: function
    for module in (
        quickstart,
        imagenet,
        ablations,
        small_data,
        pretrain,
        finetune,
        ade20k,
        camvid,
        pets,
        small_masks,
        coco,
        small_boxes,
        demo,
    )
    for name, function in _functions(module).items()
}


# Recipes for new users; `pale recipes --all` lists all.
FIRST = (
    "quickstart",
    "quickstart.segmentation",
    "quickstart.detection",
    "finetune",
    "small_data.pale_nano",
    "small_data.pale_t",
    "small_masks.upernet_nano",
    "small_masks.upernet_pale_t",
    "small_boxes.mask_rcnn_nano",
    "small_boxes.mask_rcnn_pale_t",
    "imagenet.pale_t",
    "ade20k.upernet_pale_t",
    "coco.mask_rcnn_pale_t",
)


def get(name: str) -> Recipe:
    """Return the recipe of a name, such as "imagenet.pale_t"."""
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"there is no recipe {name!r}{hint}; `pale recipes` lists them")
    about = inspect.getdoc(RECIPES[name]) or ""
    return vary(RECIPES[name](), name=name, about=about)


def register_task(
    task: type[Task], recipe_class: type[Recipe], recipes: Mapping[str, Callable[[], Recipe]]
) -> None:
    """Add a task; afterwards `pale train`, `eval`, `predict` and `export` accept it like those of this package.

    Args:
        task: its `kind`, the `kind` of its pipeline and the default of `recipe_class.kind` are the same new name.
        recipe_class: settings of its runs.
        recipes: functions without arguments that return such settings, by name, such as "rotation.small".
    """
    kind = task.kind
    names = {kind, task.pipeline.kind, recipe_class.model_fields["kind"].default}
    if len(names) > 1:
        raise ValueError(
            f"task, pipeline and recipe class must have the same kind, got {', '.join(sorted(map(str, names)))}"
        )
    if kind in TASKS or kind in KINDS:
        raise ValueError(f"there is a task {kind!r} already; choose another kind")
    if known := sorted(recipes.keys() & RECIPES.keys()):
        raise ValueError(f"there are recipes {', '.join(known)} already; choose other names")
    TASKS[kind], KINDS[kind] = task, recipe_class
    RECIPES.update(recipes)
