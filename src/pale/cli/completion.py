"""`pale completion`: a script for the shell that completes commands, options, recipes and settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from .options import Command, argument
from .parser import Parser, walk


class Completion(Command, name="completion"):
    """Print a shell script that completes commands and options with TAB.

    Writing the script takes some seconds, completion itself is fast. Write it once, and again after an update:
        mkdir -p ~/.local/share/bash-completion/completions ~/.config/fish/completions ~/.zfunc
        pale completion bash > ~/.local/share/bash-completion/completions/pale
        pale completion fish > ~/.config/fish/completions/pale.fish
        pale completion zsh > ~/.zfunc/_pale

    zsh needs `fpath+=~/.zfunc` before `compinit` in ~/.zshrc. bash without the package bash-completion needs
    `source ~/.local/share/bash-completion/completions/pale` in ~/.bashrc.
    """

    shell: Literal["bash", "zsh", "fish", "tcsh"] = argument("shell that reads the script")

    def run(self) -> None:
        """Print the script."""
        import shtab

        from .commands import build_parser

        sys.stdout.write(shtab.complete(add_values(build_parser()), self.shell) + "\n")


def add_values(parser: Parser) -> Parser:
    """Add the completions of each argument: recipes, models, files, and settings as options."""
    import shtab

    from ..tools.completion import argument_values, setting_options

    known = argument_values()
    for _, command in walk(parser):
        for action in command.actions:
            if action.type is Path or action.dest in ("source", "weights"):
                action_with_files: Any = action
                action_with_files.complete = shtab.FILE
            elif action.choices is None and action.dest in known:
                action.choices = known[action.dest]
        if command.settings is not None:
            for option in setting_options(command.settings):
                if option not in command.option_strings:
                    command.add_argument(option, help="a setting of the recipe")
    return parser
