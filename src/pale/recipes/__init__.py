"""Recipes: functions without arguments that return a complete, frozen configuration of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from types import ModuleType

from ..settings import vary
from . import (
    ablations,
    ade20k,
    camvid,
    coco,
    demo,
    finetune,
    imagenet,
    pets,
    quickstart,
    small_boxes,
    small_data,
    small_masks,
)
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


def get(name: str) -> Recipe:
    """The recipe of a name, "imagenet.pale_t"."""
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no recipe {name!r}{hint}; `pale recipes` lists them")
    about = inspect.getdoc(RECIPES[name]) or ""
    return vary(RECIPES[name](), name=name, about=about)
