"""Entry point of the `pale` command: parse, run, and print errors."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence

from ..core.escaping import escape_message as escaped
from ..core.memory import command_shortage, exhausted_memory
from ..core.options import word_hint
from ..errors import SettingsError, is_user_error
from .commands import build_parser
from .console import print_error
from .options import Command
from .parser import descend

INTERRUPTED = 130  # 128 + SIGINT, the exit code of shells
BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: list[str] | None = None) -> int:
    """Run the `pale` command; return the exit code."""
    words = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    plain, warnings.formatwarning = warnings.formatwarning, format_warning
    command: Command | None = None
    try:
        command = parse(words)
        code = command.run() or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print_error("pale: stopped by Ctrl-C")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed it, as in `pale recipes | head`: nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        # An error that the user can fix is one line, any other a traceback, escaped like all output.
        if (memory := exhausted_memory(error)) is not None:
            print_error(
                f"pale: {command_shortage(memory, error, vars(command) if command else {})}"
            )
            return 1
        if not is_user_error(error):
            print_error(traceback.format_exc().rstrip())
        print_error(f"pale: {error}")
        return 1
    finally:
        warnings.formatwarning = plain


def format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return a warning of this package as one line; one of a library with its place in the source."""
    if category.__module__.partition(".")[0] == "pale":
        return escaped(f"pale: {message}") + "\n"
    return escaped(f"{filename}:{lineno}: {category.__name__}: {message}") + "\n"


def parse(words: Sequence[str]) -> Command:
    """Return the command for the words after `pale`; exit if argparse refuses them."""
    typed, words, parser = shlex.join(["pale", *words]), list(words), build_parser()
    # A list of models may replace a command: `pale bench pale_tiny`.
    first = (words[1:2] or [""])[0]
    if words[:1] == ["bench"] and first not in (*parser.commands["bench"].commands, "-h", "--help"):
        words = ["bench", "models", *words[1:]]
    overrides: dict[str, object] = {}
    _, leaf = descend(parser, words)
    if (prefix := leaf.settings) is not None and not {"-h", "--help"} & set(words):
        words, overrides = split_overrides(words, leaf.option_strings)
        if other := [name for name in overrides if not name.startswith(prefix)]:
            raise SettingsError(
                f"--{other[0]} is not an option of this command; of a recipe's settings it takes --{prefix}*"
            )
    for value in overrides.values():
        if isinstance(value, str) and "://" in value:
            importlib.import_module("pale.data.remote").allow(value)
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        hint = word_hint(unknown[0], leaf.option_strings, leaf.settings is not None)
        parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    command: type[Command] = parsed.parser.command
    return command.from_namespace(parsed, typed, overrides)


def split_overrides(
    words: Sequence[str], known: Iterable[str]
) -> tuple[list[str], dict[str, object]]:
    """Return the words and `known` options, and the settings by name, `--name value` or `--name=value`.

    Values are read as YAML.
    """
    from ..core.settings import read_value  # imported here, for a fast `pale --help`

    rest: list[str] = []
    overrides: dict[str, object] = {}
    remaining, known = iter(words), set(known)
    for word in remaining:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in known:
            rest.append(word)
            continue
        name = name.removeprefix("--")
        if not equals:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise SettingsError(f"--{name} needs a value: --{name} VALUE")
        overrides[name] = read_value(value)
    return rest, overrides
