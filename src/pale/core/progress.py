"""Progress of long operations: a bar on stderr if it is a terminal, otherwise nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.markup import escape

from .console import Console
from .escaping import escape_line

# Called with the items, the name of the operation and the number of items; yields the items.
Track = Callable[[Iterable[Any], str, int], Iterator[Any]]


def no_progress(items: Iterable[object], what: str, total: int) -> Iterator[Any]:
    """Return the items without showing progress; the default of functions called from Python."""
    return iter(items)


def progress_bar(items: Iterable[object], what: str, total: int) -> Iterator[Any]:
    """Yield the items and show a bar, which disappears at the end."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.progress import Progress  # imported here, for a fast `pale --help`

    # Lines printed to the terminal in the meantime appear above the bar; output to a file is not redirected.
    both = sys.stdout.isatty()
    with Progress(
        console=Console(stderr=True), transient=True, redirect_stdout=both, redirect_stderr=True
    ) as progress:
        task = progress.add_task(escape(escape_line(what)), total=total)
        for item in items:
            yield item
            progress.advance(task)


def select_progress(json: bool = False, main: bool = True) -> Track:
    """Return the bar for commands, on the main process; no progress if JSON is printed."""
    return progress_bar if main and not json else no_progress
