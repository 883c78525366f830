"""Progress of long operations: a bar on stderr if it is a terminal, otherwise nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from rich.markup import escape

from .console import Console
from .escaping import escape_line

T = TypeVar("T")
R = TypeVar("R")


class Track(Protocol):
    """Shows the progress of an operation."""

    def __call__(self, items: Iterable[T], what: str, total: int, /) -> Iterator[T]:
        """Yield the items; `what` is the name of the operation, `total` their number."""


def no_progress(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Return the items without showing progress; the default of functions called from Python."""
    return iter(items)


def progress_bar(items: Iterable[T], what: str, total: int) -> Iterator[T]:
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


def map_in_threads(
    function: Callable[[T], R],
    items: Sequence[T],
    threads: int,
    track: Track = no_progress,
    what: str = "reading",
) -> list[R]:
    """Return `function(item)` for all items in order; after an error or Ctrl-C no further call starts.

    Args:
        function: called in a thread, for work that waits for the disk or releases the GIL.
        items: its arguments.
        threads: number of threads.
        track: shows the progress.
        what: name of the operation.
    """
    with ThreadPoolExecutor(threads) as pool:
        try:
            return list(track(pool.map(function, items), what, len(items)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
