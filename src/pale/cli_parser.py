"""The parser of the command line: help that reads well, and errors that name the nearest word."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

# The order of `pale --help`: what a user does first comes first.
GROUPS: dict[str, tuple[str, ...]] = {
    "start": ("demo", "doctor", "recipes", "weights", "completion"),
    "train": ("data", "train", "eval", "report", "token-labels"),
    "use": ("predict", "serve", "view", "export", "features", "probe"),
    "measure": ("info", "cost", "bench"),
}


class Help(argparse.HelpFormatter):
    """Help with defaults shown, short names for values, and examples left as they are typed."""

    def __init__(self, prog: str, **layout: Any) -> None:
        super().__init__(prog, **{"max_help_position": 28} | layout)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # A line that is set in is an example.
        lines = [
            [line] if line.startswith(" ") else textwrap.wrap(line, width) or [""]
            for line in text.splitlines()
        ]
        return "\n".join(indent + line for wrapped in lines for line in wrapped)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", shown_default(action)
        if default is None or "default" in text:
            return text
        return f"{text} (default {default})" if text else f"default {default}"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return metavar(action)


def metavar(action: argparse.Action) -> str:
    """The name of an option's value where none was given."""
    kinds: dict[Any, str] = {Path: "PATH", int: "N", float: "X"}
    return kinds.get(action.type, action.dest.upper())


def shown_default(action: argparse.Action) -> str | None:
    """An option's default as it would be typed; None where there is nothing to say."""
    value = action.default
    nothing = value is None or isinstance(value, bool) or value in (argparse.SUPPRESS, [], ())
    if not action.option_strings or nothing:
        return None
    values = value if isinstance(value, list | tuple) else (value,)
    return " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest option or command when one is misspelt."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Help} | options)

    def error(self, message: str) -> NoReturn:
        """Print usage, the error and a hint, exit with 2."""
        known = [option for action in self._actions for option in action.option_strings]
        known += [str(c) for action in self._actions for c in (action.choices or ())]
        # "argument X: invalid choice: 'y' (choose from ...)", "unrecognized arguments: --y=1": the rest is argparse's.
        _, told, wrong = message.partition("(choose from")[0].rpartition(": ")
        words = wrong.replace("'", " ").replace("=", " ").split() if told else []
        close = [
            match
            for word in words
            if word not in known and ("invalid choice" in message or word.startswith("-"))
            for match in get_close_matches(word, known, n=1)
        ]
        super().error(message + (f"; did you mean {close[0]}?" if close else ""))


class Root(Parser):
    """The parser of `pale` itself, whose help has the commands in groups."""

    def format_help(self) -> str:
        """Usage, description, the groups of commands, options, examples."""
        formatter = self._get_formatter()
        formatter.add_usage("pale COMMAND ...", [], [], prefix="usage: ")
        formatter.add_text(self.description)
        for title, names in grouped(self).items():
            formatter.start_section(title)
            formatter.add_arguments([choices(self)[name] for name in names])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([a for a in self._actions if a.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def grouped(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """The names of a parser's commands under the titles of their groups; `more` holds what has no place."""
    there = commands_of(parser)
    groups = {title: [n for n in names if n in there] for title, names in GROUPS.items()}
    placed = {name for names in groups.values() for name in names}
    groups["more"] = [name for name in there if name not in placed]
    return {title: names for title, names in groups.items() if names}


def choices(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The commands as lines of help, by name."""
    action = _subparsers(parser)
    return {} if action is None else {a.dest: a for a in action._get_subactions()}


def commands_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The parsers of a parser's commands, by name; none where it has no commands."""
    action = _subparsers(parser)
    return {} if action is None else dict(action.choices)


def _subparsers(parser: argparse.ArgumentParser) -> Any:
    found = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return next(found, None)


def descend(parser: Any, words: list[str]) -> tuple[list[str], Any]:
    """The words that name a command, and its parser: `data check DIR` gives `data check`."""
    path: list[str] = []
    for word in words:
        inner = commands_of(parser)
        if word not in inner:
            break
        path, parser = [*path, word], inner[word]
    return path, parser


def walk(parser: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its words, those that hold others before the others."""
    for name, inner in commands_of(parser).items():
        yield (*path, name), inner
        yield from walk(inner, (*path, name))


def add_command(commands: Any, name: str, run: Any, help_: str, *, json: bool = True) -> Parser:
    """A command with its one line of help; reporting commands take --json."""
    parser: Parser = commands.add_parser(name, help=help_, description=sentence(help_))
    parser.set_defaults(run=run, parser=parser)
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def add_group(commands: Any, name: str, help_: str, epilog: str | None = None) -> Any:
    """A command that holds others; returns what they are added to."""
    parser: Parser = commands.add_parser(
        name, help=help_, description=sentence(help_), epilog=epilog
    )
    parser.set_defaults(parser=parser)
    return parser.add_subparsers(
        required=True, metavar="WHAT", title="commands", parser_class=Parser
    )


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[0].upper()}{text[1:]}."
