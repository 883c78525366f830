"""The page that compares several runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.numbers import finite_number, format_number
from .charts import Chart, Series, draw_section
from .record import STEP_TITLES, RunRecord
from .settings import MISSING, different_settings
from .single import FIRST_CHARTS, best, figure_text, is_constant, progress
from .tables import number_cell, table, text

CLASSES_SHOWN = 30
NOT_COMPARED = ("event", "step", "steps", "job")


@dataclass(frozen=True)
class NamedRun:
    """A run with a name that no other run of the page has."""

    name: str
    run: RunRecord


def name_runs(runs: Sequence[RunRecord]) -> list[NamedRun]:
    """Return the runs, named by their folders, or by their paths if two folders have the same name."""
    short = [run.folder.resolve().name for run in runs]
    distinct = len(set(short)) == len(short)
    return [
        NamedRun(name if distinct else str(run.folder), run)
        for name, run in zip(short, runs, strict=True)
    ]


def comparison_page(runs: Sequence[RunRecord]) -> str:
    """Return the body of the page; see `write_comparison`."""
    named = name_runs(runs)
    parts = [
        f"<h1>{len(named)} runs compared</h1>",
        _results(named),
        _settings(named),
        draw_section(_charts(named)),
        _classes(named),
        _environment(named),
    ]
    return f"<main>{''.join(parts)}</main>"


def _figures(runs: Sequence[NamedRun]) -> list[str]:
    """Return the metrics of the evaluations of all runs, headlines first."""
    names: dict[str, None] = {}
    for each in runs:
        names |= dict.fromkeys(each.run.recipe.task_class.headline)
    for each in runs:
        names |= dict.fromkeys(each.run.metrics("eval"))
    return [name for name in names if any(each.run.points("eval", name) for each in runs)]


def _results(runs: Sequence[NamedRun]) -> str:
    rows = [["recipe", *(text(each.run.recipe.name) for each in runs)]]
    rows.append(["state", *(text(progress(each.run)) for each in runs)])
    rows += [_figure_row(runs, name) for name in _figures(runs)]
    speeds = [each.run.throughput for each in runs]
    rows.append(["images/s <small>median</small>", *(number_cell(speed) for speed in speeds)])
    return f"<h2>Results</h2>{table(('', *(text(each.name) for each in runs)), rows)}"


def _figure_row(runs: Sequence[NamedRun], name: str) -> list[str]:
    """Return a metric of all runs, with the best score in bold and the reported values."""
    values = [_best_or_last(each.run, name) for each in runs]
    score = any(best(each.run, name) for each in runs)
    known = [value for value in values if value is not None]
    top = max(known) if score and len(known) > 1 else None
    title, unit = _title(runs, name)
    row = [f"{text(title)} <small>{text(unit)} {'best' if score else 'last'}</small>"]
    for each, value in zip(runs, values, strict=True):
        if value is None:
            row.append("<td class=n>-")
            continue
        quoted = each.run.reported.get(name)
        note = "" if quoted is None else f" <small>reported {quoted:g}</small>"
        mark = " class='n top'" if value == top else " class=n"
        row.append(f"<td{mark}>{figure_text(each.run, name, value)}{note}")
    return row


def _title(runs: Sequence[NamedRun], name: str) -> tuple[str, str]:
    """Return title and unit of a metric from the first run that has it."""
    return next(each.run.title(name) for each in runs if each.run.points("eval", name))


def _best_or_last(run: RunRecord, name: str) -> float | None:
    top, found = best(run, name), run.points("eval", name)
    return top[1] if top is not None else found[-1][1] if found else None


def _settings(runs: Sequence[NamedRun]) -> str:
    changes = different_settings([each.run.recipe for each in runs])
    if not changes:
        return "<h2>Settings that differ</h2><p>None: all settings are equal.</p>"
    head = ("setting", *(text(each.name) for each in runs))
    shared: list[list[str]] = []
    others: list[list[str]] = []
    for name, values in changes.items():
        row = [f"<code>{text(name)}</code>", *map(text, values)]
        (others if MISSING in values else shared).append(row)
    more = ""
    if others:
        summary = f"Settings that only some of the recipes have ({len(others)})"
        more = f"<details><summary>{summary}</summary>{table(head, others)}</details>"
    return f"<h2>Settings that differ</h2>{table(head, shared) if shared else ''}{more}"


def _charts(runs: Sequence[NamedRun]) -> Iterator[tuple[bool, Chart]]:
    """Yield the curves of all runs together: over steps, or over epochs if batch sizes differ."""
    over = "step" if len({each.run.recipe.batch for each in runs}) == 1 else "epoch"
    headline = {name for each in runs for name in each.run.recipe.task_class.headline}
    for name in _figures(runs):
        title, unit = _title(runs, name)
        chart = Chart(
            f"validation {title}", unit or title, _series(runs, "eval", name, over), over=over
        )
        if _is_drawn(chart, name in headline):
            yield name in headline, chart
    steps = dict.fromkeys((*FIRST_CHARTS, *(n for each in runs for n in each.run.metrics("step"))))
    for name in steps:
        title, unit = STEP_TITLES.get(name, (name, name))
        chart = Chart(title[:100], unit, _series(runs, "step", name, over), over=over)
        if _is_drawn(chart, name in FIRST_CHARTS):
            yield name in FIRST_CHARTS, chart


def _is_drawn(chart: Chart, prominent: bool) -> bool:
    """Return whether a chart has curves and, unless it is among the first, more than flat lines."""
    values = [value for each in chart.series for _, value in each.points]
    return bool(values) and (prominent or not is_constant(values))


def _series(runs: Sequence[NamedRun], kind: str, name: str, over: str) -> list[Series]:
    found = [(each.name, each.run.points(kind, name, over)) for each in runs]
    return [
        Series(label, points, kind == "eval", exact=name == "lr")
        for label, points in found
        if points
    ]


def _classes(runs: Sequence[NamedRun]) -> str:
    """Return the classes on which the runs differ most, if all have the same classes and the same score."""
    task = runs[0].run.recipe.task_class
    known = _class_scores(runs, task.class_score)
    if not known:
        return ""
    readable = runs[0].run.readable_names(list(known))
    shown = dict(zip(known, readable, strict=True))
    order = sorted(known, key=lambda name: min(known[name]) - max(known[name]))
    body = [
        [text(shown[name]), *(number_cell(value, percent=True) for value in known[name])]
        for name in order[:CLASSES_SHOWN]
    ]
    title = text(task.figure_title(task.class_score))
    head = ("class", *(text(each.name) for each in runs))
    note = f"{title} of each class at the last evaluation; the greatest difference first."
    if len(known) > CLASSES_SHOWN:
        note += f" {CLASSES_SHOWN} of {format_number(len(known))} classes."
    return f"<h2>Classes that differ most</h2><p>{note}</p>{table(head, body)}"


def _class_scores(runs: Sequence[NamedRun], score: str) -> dict[str, list[float]]:
    """Return the scores of the classes that have one in every run; {} if the classes differ."""
    tables = [
        {str(row["class"]): finite_number(row.get(score)) for row in each.run.details.per_class}
        for each in runs
    ]
    if any(found.keys() != tables[0].keys() for found in tables):
        return {}
    rows = {name: [found[name] for found in tables] for name in tables[0]}
    return {
        name: [value for value in values if value is not None]
        for name, values in rows.items()
        if None not in values
    }


def _environment(runs: Sequence[NamedRun]) -> str:
    starts = [(each.run.of("start") or [{}])[-1] for each in runs]
    names = dict.fromkeys(n for start in starts for n in start if n not in NOT_COMPARED)
    rows = []
    for name in names:
        values = [text("-" if start.get(name) is None else start[name]) for start in starts]
        if len(set(values)) > 1:
            rows.append([text(name), *values])
    if not rows:
        return ""
    return f"<h2>Environments that differ</h2>{table(('', *(text(e.name) for e in runs)), rows)}"
