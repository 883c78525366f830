"""Commands declared as dataclasses.

A command is a subclass of `Command`. Its docstring is the help: the first paragraph above the options, the rest below
them. Its fields, and those of the settings classes that it inherits from, are the arguments and options, and `run`
carries it out. The type of a field decides how argparse reads it: `bool` is a switch, `Literal` gives choices, a list
takes one or more values, a tuple as many as it has items, and `X | None` is optional.
"""

from __future__ import annotations

import argparse
import inspect
import types
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Literal,
    Self,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from ..core.console import Table
from ..core.options import Spec
from ..core.options import argument as argument
from ..core.options import option as option
from ..errors import SettingsError
from .console import print_json, print_parts

METAVARS: dict[Any, str] = {Path: "PATH", int: "N", float: "X"}


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(argument, option, field)
)
@dataclass(frozen=True, kw_only=True)
class Command:
    """Base of all commands.

    Attributes:
        command_name: words after `pale`, such as "data check".
        settings: prefix of the recipe settings that are options of the command too ("": all); None for no settings.
        typed: command line, for reports.
        overrides: recipe settings that were given as options, by dotted name.
    """

    command_name: ClassVar[str] = ""
    settings: ClassVar[str | None] = None

    typed: str = "pale"
    overrides: dict[str, object] = field(default_factory=dict)

    def __init_subclass__(cls, name: str = "", settings: str | None = None) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)
        cls.command_name, cls.settings = name, settings

    @classmethod
    def help(cls) -> tuple[str, str]:
        """Return the first paragraph of the docstring, and the rest; only indented lines keep their line breaks."""
        lines: list[str] = []
        for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
            if lines and lines[-1] and line and not line.startswith(" "):
                lines[-1] += f" {line}"
            else:
                lines.append(line)
        first, _, rest = "\n".join(lines).partition("\n\n")
        return first, rest

    @classmethod
    def from_namespace(
        cls, parsed: argparse.Namespace, typed: str, overrides: dict[str, object]
    ) -> Self:
        """Return the command with the values that argparse read."""
        hints, values = get_type_hints(cls), {}
        for each in fields(cls):
            if "spec" in each.metadata:
                value = getattr(parsed, each.name)
                hint = hints[each.name]
                is_tuple = any(get_origin(part) is tuple for part in (hint, *get_args(hint)))
                values[each.name] = tuple(value) if is_tuple and value is not None else value
        return cls(typed=typed, overrides=overrides, **values)

    def run(self) -> int | None:
        """Carry out the command; return the exit code, None for 0."""
        raise NotImplementedError


class Reporting(Command):
    """Base of the commands that can print their result as JSON."""

    json: bool = option("print JSON")

    def report(self, plain: object, *parts: str | Table | Iterable[str | Table]) -> None:
        """Print JSON if requested, else lines and tables."""
        if self.json:
            print_json(plain)
        else:
            print_parts(*parts)


class Threaded(Command):
    """Base of the commands that limit the threads of PyTorch."""

    threads: int | None = option("CPU threads (default: chosen by PyTorch)")

    def set_threads(self) -> None:
        """Limit the threads if a number was given."""
        import torch

        if self.threads is not None:
            require_minimum("--threads", self.threads, 1)
            torch.set_num_threads(self.threads)


def require_minimum(name: str, value: int | None, minimum: int) -> None:
    """Refuse a number below its minimum."""
    if value is not None and value < minimum:
        raise SettingsError(f"{name} must be at least {minimum}, got {value}")


def add_arguments(parser: argparse.ArgumentParser, command: type[Command]) -> list[argparse.Action]:
    """Add the arguments and options of a command to its parser; return them."""
    hints = get_type_hints(command)
    groups: dict[Any, Any] = {None: parser}
    actions = []
    for each in fields(command):
        if (spec := each.metadata.get("spec")) is None:
            continue
        if spec.group not in groups:
            groups[spec.group] = parser.add_argument_group(*spec.group)
        keywords = _value_keywords(each.name, spec, hints[each.name], each.metadata["default"])
        if spec.flags is None:
            names = [each.name]
        else:
            names, keywords["dest"] = _option_strings(each.name, spec.flags), each.name
        keywords["help"] = _help_text(spec, each.metadata["default"])
        actions.append(groups[spec.group].add_argument(*names, **keywords))
    return actions


def _option_strings(name: str, flags: tuple[str, ...]) -> list[str]:
    """Return the option strings of a field; `--name` if no long one is declared."""
    long = any(flag.startswith("--") for flag in flags)
    return [*flags] if long else [*flags, "--" + name.replace("_", "-")]


def _help_text(spec: Spec, default: object) -> str:
    """Return the description for argparse; the default is appended unless the text mentions it."""
    text = spec.help
    hidden = default in (MISSING, None) or isinstance(default, bool)
    if spec.flags is not None and "default" not in text and not hidden:
        values = default if isinstance(default, list | tuple) else (default,)
        shown = " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
        text += f" (default {shown})" if shown else ""
    return text.replace("%", "%%")


def _value_keywords(name: str, spec: Spec, hint: object, default: object) -> dict[str, Any]:
    """Return the arguments of `add_argument` about the value of a field."""
    keywords = _read_type(hint)
    if spec.choices is not None:
        keywords["choices"] = tuple(spec.choices)
    if keywords["type"] is bool:
        return {"action": "store_true"}
    required = default is MISSING and type(None) not in get_args(hint)
    keywords["default"] = None if default is MISSING else default
    if spec.metavar is not None:
        keywords["metavar"] = spec.metavar
    elif keywords["choices"] is None:
        usual = {} if spec.flags is None else METAVARS
        keywords["metavar"] = usual.get(keywords["type"], name.upper())
    if spec.repeated:
        keywords |= {"action": "append", "nargs": None}
    if spec.flags is not None:
        keywords["required"] = required
    elif not required:
        many = keywords["nargs"] == "+"
        keywords["nargs"] = "*" if many else "?"
        if many:
            del keywords["default"]  # argparse itself gives an empty list
    return keywords


def _read_type(hint: object) -> dict[str, Any]:
    """Return `type`, `choices` and `nargs` of argparse for the type of a field."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read_type(next(each for each in inner if each is not type(None)))
    if origin is Literal:
        return {"type": type(inner[0]), "choices": inner, "nargs": None}
    if origin in (list, tuple):
        any_number = origin is list or inner[-1] is ...
        return _read_type(inner[0]) | {"nargs": "+" if any_number else len(inner)}
    return {"type": hint, "choices": None, "nargs": None}
