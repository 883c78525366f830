"""report.html of a run, and a page that compares several runs.

A run folder may come from anyone: `record.py` and `details.py` check and bound what is read, all text is escaped and
shortened (`tables.text`), and the page loads nothing and runs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...core.escaping import html_page
from ...errors import RunError
from ...tasks.base import Task
from ..checkpoint import write_text
from . import charts
from .comparison import comparison_page
from .record import read_run
from .single import single_page

MAX_RUNS = 16  # on one page
COMPARISON = Path("comparison.html")
STYLE = charts.STYLE + (Path(__file__).parent / "report.css").read_text()


def write(run: Path, task: Task | None = None) -> Path:
    """Write report.html of a run, finished or not, and return its path.

    Args:
        run: folder of the run.
        task: task of the run, if it is in memory; None: it is built from the recipe.
    """
    record = read_run(run)
    return _write_page(run / "report.html", record.recipe.name, single_page(record, task))


def write_comparison(runs: Sequence[Path], output: Path = COMPARISON) -> Path:
    """Write a page that compares runs, and return its path."""
    if len(runs) > MAX_RUNS:
        raise RunError(f"a page compares at most {MAX_RUNS} runs, got {len(runs)}; give fewer")
    records = [read_run(run) for run in runs]
    return _write_page(output, f"{len(runs)} runs compared", comparison_page(records))


def write_pages(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of one run into its folder, or the comparison of several; return its path.

    Args:
        runs: folders of the runs.
        output: page of a comparison.
    """
    if len(runs) > 1:
        return write_comparison(runs, output or COMPARISON)
    if output is not None:
        raise RunError(
            f"--output names the page that compares several runs, got one run, whose report is "
            f"{runs[0] / 'report.html'}; leave it out"
        )
    return write(runs[0])


def _write_page(path: Path, title: str, body: str) -> Path:
    write_text(path, html_page(title[:200], STYLE, body))
    return path
