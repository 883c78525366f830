"""How the commands speak."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from .data.check import Findings


def say(text: str) -> None:
    """A line."""
    sys.stdout.write(text + "\n")


def say_json(plain: Any, indent: int | None = 1) -> None:
    """For programs."""
    sys.stdout.write(json.dumps(plain, indent=indent) + "\n")


def console() -> Console:
    """For tables; where there is no terminal, wide enough for the paper's."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def say_problems(found: Findings) -> None:
    """Each problem of a data set with what has it, and the verdict."""
    from .data.check import SHOWN

    for problem in found.problems:
        word = "problem" if problem.serious else "note"
        say(f"{word}: {problem.kind} ({len(problem.items)}); {problem.advice}")
        for item in problem.items[:SHOWN]:
            say(f"  {item}")
        if len(problem.items) > SHOWN:
            say(f"  and {len(problem.items) - SHOWN} more; --json names all")
    say("ready to train" if found.good else "not ready: see the problems above")
