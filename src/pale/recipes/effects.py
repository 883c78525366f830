"""Settings that another setting switches off.

`pale train` refuses to change such a setting, instead of ignoring the change (`Recipe.changed`). Recipes stored with a
run or with weights are read without this check, so that old weights stay usable. `Recipe.override`, for programs that
set whole parts, does not check either. Each recipe class lists its rules in `inactive_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.settings import find_value

if TYPE_CHECKING:
    from .schema import Recipe


@dataclass(frozen=True)
class InactiveSettings:
    """Settings that have no effect under a condition.

    Attributes:
        names: dotted names.
        when: returns whether they have no effect in a recipe.
        reason: end of the sentence "NAME has no effect ...": the reason, and what to do.
    """

    names: tuple[str, ...]
    when: Callable[[Any], bool]
    reason: str


COMMON = (
    InactiveSettings(
        ("epochs",),
        lambda r: r.steps is not None,
        "while steps is set; set steps, or also set steps=null",
    ),
    InactiveSettings(
        ("warmup_epochs",),
        lambda r: r.warmup_steps is not None,
        "while warmup_steps is set; set warmup_steps, or also set warmup_steps=null",
    ),
    InactiveSettings(
        ("optim.warmup_lr",),
        lambda r: not (r.warmup_epochs if r.warmup_steps is None else r.warmup_steps),
        "without a warm-up; set warmup_epochs or warmup_steps above 0, or remove it",
    ),
    InactiveSettings(
        ("optim.lr_batch",),
        lambda r: not r.optim.scale_lr,
        "while optim.scale_lr is false; remove one of them",
    ),
    InactiveSettings(
        ("optim.steps_at", "optim.step_factor"),
        lambda r: r.optim.schedule != "steps",
        "unless optim.schedule is steps; set it, or remove this",
    ),
    InactiveSettings(
        ("optim.min_lr",),
        lambda r: r.optim.schedule == "steps",
        "while optim.schedule is steps, which has no minimum; remove one of them",
    ),
    InactiveSettings(
        ("model.new_head",),
        lambda r: r.model.weights is None,
        "without model.weights; set it, or remove this",
    ),
)
HOLD_OUT = (
    InactiveSettings(
        ("data.val",),
        lambda r: r.data.hold_out > 0,
        "while data.hold_out validates on a part of the training set; remove one of them",
    ),
    InactiveSettings(
        ("data.hold_out_by",),
        lambda r: not r.data.hold_out,
        "while data.hold_out is 0; set it, or remove this",
    ),
)
# Reasons that several tasks share.
ONLY_SCENES = "unless data.kind is scenes; set it, or remove this"
NOT_SCENES = "while data.kind is scenes, which are generated; set data.kind, or remove this"
LABEL_FILES = (
    "while data.kind is yolo or voc, which have a fixed layout; set only data.root and the splits"
)
WHOLE = "while {0}.mode is whole; also set {0}.mode=slide, or remove this"
# A user who gives these expects an effect even of the default value.
ALWAYS_CHECKED = frozenset({"epochs", "warmup_epochs"})


def find_inactive(recipe: Recipe, names: Iterable[str]) -> list[str]:
    """Return a sentence for each named setting that differs from its default but has no effect."""
    default = type(recipe)()
    found = []
    for name in names:
        if name not in ALWAYS_CHECKED and find_value(recipe, name) == find_value(default, name):
            continue
        for rule in recipe.inactive_rules:
            if name in rule.names and rule.when(recipe):
                found.append(f"{name} has no effect {rule.reason}")
                break
    return found


def setting_names(changes: Mapping[str, object]) -> Iterator[str]:
    """Yield the dotted names of the settings in `changes`; a part counts as all its settings."""
    for name, value in changes.items():
        if isinstance(value, Mapping) and name != "model.options":
            yield from setting_names({f"{name}.{inner}": each for inner, each in value.items()})
        else:
            yield name
