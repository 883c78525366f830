"""The argument parser: readable help, commands in groups, and errors that name the nearest word."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from ..core.escaping import escape_line
from .options import Command, add_arguments

COMMON_WORDS = {"gpu": "cuda"}  # of other programs, and not similar to those here


class Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter that wraps paragraphs and keeps indented lines (examples) unchanged."""

    def __init__(self, prog: str, **layout: Any) -> None:
        super().__init__(prog, **{"max_help_position": 28} | layout)

    def add_text(self, text: str | None) -> None:
        """Add a description or an epilog."""
        width = shutil.get_terminal_size().columns - 2
        lines = [
            [line] if line.startswith(" ") else textwrap.wrap(line, width) or [""]
            for line in (text or "").splitlines()
        ]
        super().add_text("\n".join(line for wrapped in lines for line in wrapped) or None)


class Parser(argparse.ArgumentParser):
    """Parser of a command or of a group of commands.

    Attributes:
        actions: arguments and options.
        commands: parsers of the commands in a group, by name.
        groups: names of the commands of `pale` itself under the titles of its help.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Help, add_help=False, **options)
        help_ = self.add_argument("-h", "--help", action="help", help="print this help and exit")
        self.actions: list[argparse.Action] = [help_]
        self.commands: dict[str, Parser] = {}
        self.groups: dict[str, list[str]] = {}
        self.command: type[Command] | None = None
        self.set_defaults(parser=self)

    @property
    def option_strings(self) -> list[str]:
        """All option strings."""
        return [option for action in self.actions for option in action.option_strings]

    @property
    def settings(self) -> str | None:
        """Prefix of the recipe settings that are options too ("": all); None for no settings."""
        return self.command.settings if self.command is not None else None

    def take(self, command: type[Command]) -> None:
        """Add the arguments and options of a command, which runs if no command of the group is given."""
        self.command, self.epilog = command, command.help()[1] or None
        self.actions += add_arguments(self, command)

    def error(self, message: str) -> NoReturn:
        """Print the usage, the error and the nearest valid word; exit with 2."""
        known = [*self.option_strings, *self.commands]
        known += [str(choice) for action in self.actions for choice in action.choices or ()]
        # argparse's messages: "argument X: invalid choice: 'y' (choose from ...)", "unrecognized arguments: --y=1".
        _, colon, wrong = message.partition("(choose from")[0].rpartition(": ")
        words = wrong.replace("'", " ").replace("=", " ").split() if colon else []
        close = [
            match
            for word in words
            if word not in known
            and ("invalid choice" in message or ("unrecognized" in message and word[0] == "-"))
            for match in get_close_matches(COMMON_WORDS.get(word, word), known, n=1)
        ]
        super().error(escape_line(message + (f"; did you mean {close[0]}?" if close else "")))

    def format_help(self) -> str:
        """Return the help; that of `pale` itself lists the commands in groups."""
        if not self.groups:
            return super().format_help()
        formatter = Help(self.prog)
        formatter.add_usage(f"{self.prog} COMMAND ...", [], [], prefix="usage: ")
        formatter.add_text(self.description)
        for title, names in self.groups.items():
            lines = [(name, help_line(self.commands[name].description or "")) for name in names]
            formatter.start_section(title)
            formatter.add_arguments([argparse.Action([], n, metavar=n, help=h) for n, h in lines])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(self.actions)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def build(
    root: Parser,
    table: Mapping[str, Sequence[type[Command]]],
    containers: Mapping[str, tuple[str, str]],
) -> None:
    """Add all commands.

    Args:
        root: parser of `pale`.
        table: commands under the titles of the help.
        containers: description and epilog of the names that are groups of commands and no command themselves.
    """
    inner: dict[str, Any] = {"": root.add_subparsers(required=True, metavar="COMMAND")}
    for title, commands in table.items():
        for command in commands:
            group, _, name = command.command_name.rpartition(" ")
            if group not in inner:
                inner[group] = _open_group(root, inner[""], group, containers)
            parent = root.commands[group] if group else root
            text, _ = command.help()
            parser = inner[group].add_parser(name, help=help_line(text), description=text)
            parser.take(command)
            parent.commands[name] = parser
            first = command.command_name.partition(" ")[0]
            if first not in (names := root.groups.setdefault(title, [])):
                names.append(first)


def _open_group(
    root: Parser, commands: Any, name: str, containers: Mapping[str, tuple[str, str]]
) -> Any:
    """Return the subparsers of a group; the group may be a command itself."""
    if name not in root.commands:
        text, epilog = containers[name]
        root.commands[name] = commands.add_parser(
            name, help=help_line(text), description=text, epilog=epilog or None
        )
    parser = root.commands[name]
    required = parser.command is None
    return parser.add_subparsers(
        required=required, metavar="COMMAND", title="commands", parser_class=Parser
    )


def help_line(text: str) -> str:
    """Return the first paragraph for a list of commands: no capital, no full stop."""
    first = text.partition("\n\n")[0].removesuffix(".").replace("%", "%%")
    return first[:1].lower() + first[1:]


def descend(parser: Parser, words: Sequence[str]) -> tuple[list[str], Parser]:
    """Return the words that name a command, and its parser: `data check DIR` gives `data check`."""
    path: list[str] = []
    for word in words:
        if word not in parser.commands:
            break
        path, parser = [*path, word], parser.commands[word]
    return path, parser


def walk(parser: Parser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Parser]]:
    """Yield every command with its words, groups before their commands."""
    for name, inner in parser.commands.items():
        yield (*path, name), inner
        yield from walk(inner, (*path, name))
