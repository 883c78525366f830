"""`pale completion`: a script for the shell that completes commands, options, recipes and settings."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from . import cli_parser

SHELLS = ("bash", "zsh", "fish", "tcsh")
EPILOG = """Making the script takes some seconds, completing takes none. Make it once, and again after an update:
  mkdir -p ~/.local/share/bash-completion/completions ~/.config/fish/completions ~/.zfunc
  pale completion bash > ~/.local/share/bash-completion/completions/pale
  pale completion fish > ~/.config/fish/completions/pale.fish
  pale completion zsh > ~/.zfunc/_pale

zsh needs `fpath+=~/.zfunc` before `compinit` in ~/.zshrc. bash without the package bash-completion takes
`source ~/.local/share/bash-completion/completions/pale` in ~/.bashrc."""


def add_command(commands: Any) -> None:
    """Add `pale completion`."""
    completion = cli_parser.add_command(
        commands, "completion", run, "print a script that completes commands in a shell", json=False
    )
    completion.add_argument("shell", choices=SHELLS, help="for which shell")
    completion.epilog = EPILOG


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    import shtab

    from .cli import _parser

    sys.stdout.write(shtab.complete(enriched(_parser()), args.shell) + "\n")


def enriched(parser: Any) -> Any:
    """The parser with what can stand in each place: recipes, models, files, settings as options."""
    import shtab

    from .cli_train import OVERRIDDEN
    from .pale_transformer import VARIANTS
    from .recipes import RECIPES
    from .recipes.schema import KINDS
    from .settings import names

    settings = dict.fromkeys(name for kind in KINDS.values() for name in names(kind))
    known: dict[str, list[str]] = {
        "recipe": list(RECIPES),
        "name": list(RECIPES),
        "model": list(VARIANTS),
    }
    for path, command in cli_parser.walk(parser):
        for action in command._actions:
            if action.type is Path or action.dest in ("source", "weights"):
                action.complete = shtab.FILE
            elif action.choices is None and action.dest in known:
                action.choices = known[action.dest]
        if " ".join(path) in OVERRIDDEN:
            kept = [
                n for n in settings if path != ("token-labels", "make") or n.startswith("data.")
            ]
            for option in (f"--{name}" for name in kept):
                if option not in command._option_string_actions:
                    command.add_argument(option, help="a setting of the recipe")
    return parser
