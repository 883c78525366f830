"""Progress of what takes long: a bar on a terminal's stderr, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Takes items, what is done with them, and how many there are; gives the items.
Track = Callable[[Iterable[Any], str, int], Iterator[Any]]


def silent(items: Iterable[Any], what: str, total: int) -> Iterator[Any]:
    """The items alone: the default of everything that is called from Python."""
    return iter(items)


def bar(items: Iterable[Any], what: str, total: int) -> Iterator[Any]:
    """The items, with a bar that is gone when they are done."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    # Lines written meanwhile stand above the bar, but what goes to a file goes there.
    both = sys.stdout.isatty()
    with Progress(
        console=Console(stderr=True), transient=True, redirect_stdout=both, redirect_stderr=True
    ) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            yield item
            progress.advance(task)


def shown(json: bool = False, main: bool = True) -> Track:
    """The bar for commands, on the main process; none beside JSON."""
    return bar if main and not json else silent
