"""Tables of a report: plain ones, tables that can be sorted without scripts, and the confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest

from ...core.escaping import escape_html
from ...core.numbers import finite_number, format_number
from .details import Details, Row

MAX_TEXT = 300  # characters of a text from a file
MAX_MATRIX = 40  # classes of a confusion matrix that is drawn; of larger ones only the worst pairs are listed
WORST_PAIRS = 20
MAX_COUNT = 9999  # in a cell of the matrix; larger counts are shown as shares
MAX_ROWS = 1000  # of a table


def text(value: object, limit: int = MAX_TEXT) -> str:
    """Return text from a file for HTML, shortened to `limit` characters."""
    found = str(value)
    return escape_html(found if len(found) <= limit else found[: limit - 1] + "…")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], look: str = "") -> str:
    """Return a table in a frame that scrolls; cells are HTML, and those of numbers start with "<td class=n"."""
    rows = list(rows)
    first = rows[0] if rows else [""] * len(head)
    numbers = [cell.startswith(("<td class=n", "<td class='n")) for cell in first]
    titles = "".join(
        f"<th{' class=n' * number}>{title}" for title, number in zip(head, numbers, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(cell if cell.startswith("<td") else f"<td>{cell}" for cell in row)
        for row in rows
    )
    return f"<div class='scroll {look}'><table><thead><tr>{titles}<tbody>{body}</table></div>"


def number_cell(value: object, percent: bool = False) -> str:
    """Return a right-aligned cell; percentages have one digit and a bar."""
    number = finite_number(value)
    if number is None:
        return (
            "<td class=n>-" if value is None or isinstance(value, float) else f"<td>{text(value)}"
        )
    if not percent:
        return f"<td class=n>{format_number(number)}"
    return f"<td class='n bar' style='--v:{min(max(number, 0), 100):.1f}'>{number:.1f}"


def sorted_tables(rows: Sequence[Row], titles: Sequence[str], chosen: str, name: str) -> str:
    """Return one table for each column, sorted by it, with buttons that choose one; no script is needed.

    Percentages start with the lowest, counts with the highest, names with A.

    Args:
        rows: rows with equal keys.
        titles: titles of the columns.
        chosen: column of the table that is shown first, if there is such a column.
        name: name of the group of buttons on the page.
    """
    columns = list(rows[0])
    percents = [column for column in columns if _is_percent(rows, column)]
    chosen = chosen if chosen in columns else columns[0]
    order = [chosen, *(column for column in columns if column != chosen)]
    shown = dict(zip(columns, titles, strict=True))
    buttons, panes = [], []
    for i, column in enumerate(order):
        checked = " checked" if i == 0 else ""
        buttons.append(
            f"<input type=radio name={name} id={name}{i}{checked}><label for={name}{i}>{text(shown[column])}</label>"
        )
        found = sorted(rows, key=lambda row, c=column: _rank(row, c, percents))[:MAX_ROWS]  # type: ignore[misc]
        cells = ([_cell(row, c, percents) for c in columns] for row in found)
        head = [
            f"{text(shown[c])}{_arrow(rows, c, percents) if c == column else ''}" for c in columns
        ]
        panes.append(f"<div class=pane>{table(head, cells, 'tall')}</div>")
    note = (
        f"<p><small>{MAX_ROWS:,} of {len(rows):,} rows each.</small>"
        if len(rows) > MAX_ROWS
        else ""
    )
    return f"<div class=sorted><span>Sort by</span>{''.join(buttons)}{''.join(panes)}</div>{note}"


def _is_percent(rows: Sequence[Row], column: str) -> bool:
    """Return whether a column holds percentages: floats, whereas counts are integers."""
    found = [row[column] for row in rows if row[column] is not None]
    return bool(found) and all(isinstance(value, float) for value in found)


def _rank(row: Row, column: str, percents: Sequence[str]) -> tuple[object, ...]:
    value = row[column]
    number = finite_number(value)
    if column == "class" or (number is None and value is not None and not isinstance(value, float)):
        return (0, str(value).casefold(), 0.0)
    if number is None:  # not defined: last
        return (2, "", 0.0)
    return (1, "", number if column in percents else -number)


def _cell(row: Row, column: str, percents: Sequence[str]) -> str:
    return text(row[column]) if column == "class" else number_cell(row[column], column in percents)


def _arrow(rows: Sequence[Row], column: str, percents: Sequence[str]) -> str:
    return " ▲" if column in percents or isinstance(rows[0][column], str) else " ▼"


def confusion(details: Details, names: Sequence[str], unit: str) -> str:
    """Return the confusion matrix, if it is small enough to be readable, and the most frequent confusions.

    Args:
        details: content of evaluation.json, with the matrix.
        names: names of the classes, as they are shown.
        unit: what is counted, such as "images".
    """
    if details.confusion is None or not names:
        return ""
    matrix = details.confusion
    small = len(names) <= MAX_MATRIX
    most = WORST_PAIRS // (2 if small else 1)
    worst = nlargest(most, pairs(matrix), key=lambda pair: (pair[0], -pair[1], -pair[2]))
    rows = [
        [text(names[i]), text(names[j]), number_cell(count), f"<td class=n>{_share(matrix[i], j)}"]
        for count, i, j in worst
    ]
    listed = "<p>No mistakes.</p>"
    if rows:
        head = ("label", "prediction", text(unit), f"of the label's {text(unit)}")
        listed = f"<h3>Most frequent confusions</h3>{table(head, rows)}"
    if not small:
        note = f"<p>{len(names):,} classes are too many for a readable matrix; these are the worst of its cells.</p>"
        return f"<h2>Confusion</h2>{note}{listed}"
    drawn = _matrix(matrix, names, unit)
    return f"<h2>Confusion</h2><div class=row><div>{drawn}</div><div>{listed}</div></div>"


def pairs(matrix: Sequence[Sequence[float]]) -> Iterator[tuple[float, int, int]]:
    """Yield count, label and prediction of each kind of mistake."""
    for i, row in enumerate(matrix):
        for j, count in enumerate(row):
            if i != j and count > 0 and math.isfinite(count):
                yield count, i, j


def _fraction(row: Sequence[float], j: int) -> float:
    """Return the share of a cell in its row, 0 to 1; 0 if the row is empty or not finite."""
    total = sum(row)
    usable = math.isfinite(total) and total > 0 and math.isfinite(row[j])
    return min(max(row[j] / total, 0.0), 1.0) if usable else 0.0


def _share(row: Sequence[float], j: int) -> str:
    share = 100 * _fraction(row, j)
    return f"{share:.1f} %" if share >= 0.05 or not row[j] else "&lt; 0.1 %"


def _matrix(matrix: list[list[float]], names: Sequence[str], unit: str) -> str:
    """Return the matrix as a table: counts, or shares of the row in per cent if counts are long."""
    finite = [count for row in matrix for count in row if math.isfinite(count)]
    counted = max(finite, default=0.0) <= MAX_COUNT
    head = "".join(f"<th class=up><span>{text(name, 40)}</span>" for name in names)
    body = []
    for i, row in enumerate(matrix):
        cells = []
        for j, count in enumerate(row):
            share = _fraction(row, j)
            number = finite_number(count)
            shown = "-" if number is None else format_number(number)
            tip = f"{names[i][:MAX_TEXT]} as {names[j][:MAX_TEXT]}: {shown} {unit}, {100 * share:.1f} %"
            inside = shown if counted else f"{100 * share:.0f}"
            look = " class=own" if i == j else ""
            look += " data-dark" if share >= 0.55 else ""
            body_text = inside if number != 0 else ""
            cells.append(
                f"<td{look} style='--v:{100 * share:.1f}' title='{escape_html(tip)}'>{body_text}"
            )
        body.append(f"<tr><th>{text(names[i], 40)}{''.join(cells)}")
    what = f"number of {text(unit)}" if counted else f"per cent of the {text(unit)} of the label"
    dense = " dense" if len(names) > 20 else ""
    return (
        f"<p>Rows: labels. Columns: predictions.<br>Cells: {what}; shaded by the share of the row.</p>"
        f"<div class=scroll><table class='matrix{dense}'><tr><td>{head}{''.join(body)}</table></div>"
    )
