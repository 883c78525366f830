"""Options declared beside the settings that they set.

The fields of a settings class are declared with `option` or `argument`. The command line reads name, type, default and
description from them, so each is written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass(frozen=True)
class Spec:
    """Description of a field as an argument, beyond its name and type.

    Attributes:
        help: one line; the default is appended unless the text mentions it.
        flags: option strings besides `--name`, or instead of it if one starts with `--`; None: positional.
        metavar: name of the value in the help; None for the usual one of the type.
        group: title and description of the part of the help where it is listed.
        repeated: whether the option is given once for each item of a list.
        choices: allowed values, if they are known only when the command line is parsed.
    """

    help: str
    flags: tuple[str, ...] | None = None
    metavar: str | tuple[str, ...] | None = None
    group: tuple[str, str] | None = None
    repeated: bool = False
    choices: Iterable[str] | None = None


def argument(help_: str, *, default: object = MISSING, metavar: str | None = None) -> Any:
    """Declare a positional argument."""
    return _field(Spec(help_, None, metavar), default)


def option(
    help_: str,
    *flags: str,
    default: object = MISSING,
    metavar: str | tuple[str, ...] | None = None,
    group: tuple[str, str] | None = None,
    repeated: bool = False,
    choices: Iterable[str] | None = None,
) -> Any:
    """Declare an option; it is required if it has no default and its type is neither `bool` nor `X | None`."""
    return _field(Spec(help_, flags, metavar, group, repeated, choices), default)


def _field(spec: Spec, default: object) -> Any:
    metadata = {"spec": spec, "default": default}
    if isinstance(default, list):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, field_specifiers=(argument, option, field))
def settings_class(cls: type[T]) -> type[T]:
    """Make a class of settings: a frozen dataclass."""
    return dataclass(frozen=True)(cls)


def word_hint(word: str, options: Sequence[str], settings: bool) -> str:
    """Return how to give a word that is no argument of a command as an option or as a setting.

    Args:
        word: the word.
        options: options of the command.
        settings: whether the command accepts settings of recipes.
    """
    if word.startswith("-"):
        return ""
    if settings:
        if "=" in word:
            return f"; a setting starts with two dashes: --{word}"
        return f"; a folder of data is a setting: --data.root {word}"
    return f"; a model is an option: --weights {word}" if "--weights" in options else ""
