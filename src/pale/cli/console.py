"""Console output of the commands. Text that may come from files is escaped here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from ..core.console import Console, Table
from ..core.escaping import escape_line, escape_message


def print_line(text: str) -> None:
    """Print a line."""
    sys.stdout.write(escape_line(text) + "\n")


def print_error(text: str) -> None:
    """Print a message on stderr; lines after the first are indented."""
    sys.stderr.write(escape_message(text) + "\n")


def print_json(value: object, indent: int | None = 1) -> None:
    """Print JSON; `indent=None` for one line."""
    sys.stdout.write(json.dumps(value, indent=indent) + "\n")


def print_parts(*parts: str | Table | Iterable[str | Table]) -> None:
    """Print lines and tables; tables are 140 columns wide if there is no terminal."""
    for part in parts:
        if isinstance(part, str):
            print_line(part)
        elif isinstance(part, Table):
            Console(width=None if sys.stdout.isatty() else 140).print(part)
        else:
            print_parts(*part)
