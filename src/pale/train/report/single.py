"""The page of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...core.numbers import finite_number, format_number
from ...recipes.files import recipe_to_yaml
from ...tasks.base import Task
from .charts import Chart, Series, draw_section
from .images import Images
from .record import STEP_TITLES, RunRecord
from .settings import different_settings
from .tables import confusion, number_cell, sorted_tables, table, text

FIRST_CHARTS = (
    "loss",
    "lr",
    "images_per_s",
)  # metrics of the training loop; the others are collapsed


def single_page(run: RunRecord, task: Task | None = None) -> str:
    """Return the body of the page; see `write`."""
    names = run.readable_names(run.details.classes)
    images = Images(run.recipe, run.details, names, task)
    parts = [
        _header(run),
        _result(run),
        _settings(run),
        _curves(run),
        confusion(run.details, names, run.recipe.task_class.confusion_unit),
        _classes(run, names),
        images.guesses(),
        images.gallery(),
        _environment(run),
        f"<h2>Recipe</h2><details><summary>All settings as YAML</summary>"
        f"<pre>{text(recipe_to_yaml(run.recipe), 1 << 20)}</pre></details>",
    ]
    return f"<main>{''.join(parts)}</main>"


def progress(run: RunRecord) -> str:
    """Return the progress of a run, such as "finished, 300 of 300 steps"."""
    planned = run.steps_planned
    length = "?" if planned is None else format_number(planned)
    return f"{run.state}, {format_number(run.steps_done)} of {length} steps"


def best(run: RunRecord, name: str) -> tuple[float, float] | None:
    """Return the step and the value of the best evaluation; None for metrics of which greater is not better."""
    found = run.points("eval", name)
    if not found or name not in (*run.recipe.task_class.scores, *run.recipe.task_class.headline):
        return None
    return max(found, key=lambda point: (point[1], -point[0]))


def figure_text(run: RunRecord, name: str, value: float) -> str:
    """Return a figure of an evaluation as text; percentages have two digits."""
    return f"{value:.2f}" if run.title(name)[1] == "%" else format_number(value)


def _header(run: RunRecord) -> str:
    tiles = []
    for name, label in run.recipe.task_class.headline.items():
        if (top := best(run, name)) is not None:
            note = f"best, step {format_number(top[0])}"
            if name in run.reported:
                note += f"; reported {run.reported[name]:g}"
            tiles.append((f"{figure_text(run, name, top[1])} {run.title(name)[1]}", label, note))
    done = format_number(run.steps_done)
    tiles.append(
        (done, "steps", f"of {format_number(run.steps_planned)}" if run.steps_planned else "")
    )
    if run.throughput is not None:
        tiles.append((format_number(run.throughput), "images/s", "median of the log"))
    boxes = "".join(
        f"<div class=tile><b>{text(value)}</b><span>{text(label)}</span><small>{text(note)}</small></div>"
        for value, label, note in tiles
    )
    return (
        f"<h1>{text(run.recipe.name)}</h1><p>{text(run.recipe.about, 1000)}</p>"
        f"<p class=state>Run <b>{text(run.folder.name)}</b>: {text(progress(run))}</p><div class=tiles>{boxes}</div>"
    )


def _result(run: RunRecord) -> str:
    rows = []
    for name, value in run.last_evaluation.items():
        number, top = finite_number(value), best(run, name)
        title, unit = run.title(name)
        last = "NaN or Inf" if number is None else figure_text(run, name, number)
        rows.append(
            [
                text(title) + (f" <small>{text(unit)}</small>" if unit else ""),
                f"<td class=n>{last}",
                f"<td class=n>{'' if top is None else figure_text(run, name, top[1])}",
                f"<td class=n>{'' if top is None else format_number(top[0])}",
            ]
            + ([f"<td class=n>{run.reported.get(name, '')}"] if run.reported else [])
        )
    if skipped := run.of("skipped"):
        note = "steps skipped <small>loss or gradient was NaN or Inf; log.jsonl lists the samples</small>"
        rows.append([note, number_cell(len(skipped))])
    if not run.last_evaluation:
        rows.append(["not evaluated yet"])
    quoted = "<p><small>Reported: what the recipe quotes for its own settings and data.</small></p>"
    head = ["validation", "last", "best", "at step", *(["reported"] if run.reported else [])]
    rows = [row + ["<td class=n>"] * (len(head) - len(row)) for row in rows]
    return f"<h2>Result</h2>{table(head, rows)}{quoted if run.reported else ''}"


def _settings(run: RunRecord) -> str:
    if run.base is None:
        return f"<h2>Settings</h2><p>{text(run.recipe.name)} is not a recipe of this package.</p>"
    changes = different_settings([run.base, run.recipe])
    if not changes:
        return f"<h2>Settings</h2><p>Those of the recipe {text(run.recipe.name)}.</p>"
    rows = [[f"<code>{text(name)}</code>", *map(text, values)] for name, values in changes.items()]
    return f"<h2>Settings that differ from the recipe</h2>{table(('setting', 'recipe', 'this run'), rows)}"


def _curves(run: RunRecord) -> str:
    note = ""
    if (epoch := run.steps_per_epoch) is not None:
        note = f"<p>One epoch has {format_number(epoch)} steps.</p>"
    return draw_section(charts(run), note)


def charts(run: RunRecord) -> Iterator[tuple[bool, Chart]]:
    """Yield the curves of a run, and whether each is shown without expanding.

    A metric with one value has no curve; one that never changes has none unless it is among the first.
    """
    headline = run.recipe.task_class.headline
    for name in dict.fromkeys((*headline, *run.metrics("eval"))):
        found = run.points("eval", name)
        if len(found) < 2 or (name not in headline and is_constant([v for _, v in found])):
            continue
        title, unit = run.title(name)
        levels = {"reported": run.reported[name]} if name in run.reported else {}
        title = f"validation {headline.get(name, title)}"
        yield name in headline, Chart(title, unit or title, [Series(name, found, True)], levels)
    for name in dict.fromkeys((*FIRST_CHARTS, *run.metrics("step"))):
        found = run.points("step", name)
        if len(found) < 2 or (name not in FIRST_CHARTS and is_constant([v for _, v in found])):
            continue
        title, unit = STEP_TITLES.get(name, (name, name))
        yield (
            name in FIRST_CHARTS,
            Chart(title[:100], unit, [Series(name, found, exact=name == "lr")]),
        )


def is_constant(values: Sequence[float]) -> bool:
    """Return whether a curve would be a flat line or a dot."""
    return min(values) == max(values)


def _classes(run: RunRecord, names: Sequence[str]) -> str:
    rows = run.details.per_class
    if not rows:
        return ""
    readable = dict(zip(run.details.classes, names, strict=True))
    shown = [row | {"class": readable.get(str(row["class"]), row["class"])} for row in rows]
    titles = [run.recipe.task_class.figure_title(name) for name in rows[0]]
    return f"<h2>Classes</h2>{sorted_tables(shown, titles, run.recipe.task_class.class_score, 'classes')}"


def _environment(run: RunRecord) -> str:
    starts = run.of("start")
    if not starts:
        return ""
    rows = [
        [text(name), text(value)]
        for name, value in starts[-1].items()
        if name not in ("event", "step", "steps") and value is not None
    ]
    times = "once" if len(starts) == 1 else f"{len(starts)} times"
    notes = "".join(f"<li>{text(event.get('text'))}" for event in run.of("note")[:20])
    return (
        f"<h2>Environment</h2><details><summary>Versions and hardware; started {times}</summary>"
        f"{table(('', ''), rows)}{f'<ul>{notes}</ul>' if notes else ''}</details>"
    )
