"""Freeze a part of a model, so that fewer parameters are trained."""

from __future__ import annotations

from typing import Any, Literal

from timm.models import group_parameters
from torch import nn

from ..errors import SettingsError

FreezeLevel = Literal["nothing", "early", "backbone"]


def freeze_parameters(model: nn.Module, level: FreezeLevel) -> None:
    """Freeze the early half of the stages, or everything except the heads, by timm's layer groups."""
    if level == "nothing":
        return
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise SettingsError(
            f"model.freeze needs a model with timm's layer groups, {type(model).__name__} has none; set it to nothing"
        )
    groups = group_parameters(model, matcher(coarse=True))
    numbers = sorted(groups)
    frozen = numbers[:-1] if level == "backbone" else numbers[: len(numbers) // 2]
    names = {name for number in frozen for name in groups[number]}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
