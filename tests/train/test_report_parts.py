"""Charts and tables of the report, by themselves."""

import math
import random
import re

import pytest

from pale.train.report.charts import DRAWN, Chart, Series, draw, smooth, thin, ticks
from pale.train.report.details import Details
from pale.train.report.record import MAX_VALUE, points
from pale.train.report.settings import different_settings, flat_settings
from pale.train.report.tables import confusion, sorted_tables, text


def test_the_mean_of_a_curve_equals_the_mean_of_each_window():
    draw_one = random.Random(0)
    curve = [(float(i), draw_one.random()) for i in range(100)]
    found = smooth(curve)
    for i, (x, mean) in enumerate(found):
        window = [value for _, value in curve[max(0, i - 2) : i + 3]]  # 100 / 40 on either side
        assert x == i
        assert mean == pytest.approx(sum(window) / len(window))


def test_a_smoothed_line_lags_behind_nothing():
    line = [(float(i), 2.0 * i) for i in range(200)]
    assert smooth(line)[5:-5] == line[5:-5]


def test_a_thinned_curve_keeps_its_ends_and_its_extremes():
    curve = [(float(i), math.sin(i)) for i in range(20_000)]
    curve[777] = (777.0, 50.0)
    found = thin(curve)
    assert len(found) <= 2 * DRAWN + 2
    assert found == sorted(found)
    assert {curve[0], curve[777], curve[-1]} <= set(found)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (1, 48, [10, 20, 30, 40]),
        (0, 1e-3, [0, 2e-4, 4e-4, 6e-4, 8e-4, 1e-3]),
        (-0.3, 0.3, [-0.2, 0, 0.2]),
        (62_000, 63_000, [62_000, 62_200, 62_400, 62_600, 62_800, 63_000]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected, abs=1e-12)


def test_ticks_of_steps_are_whole():
    assert ticks(1, 4, whole=True) == [1, 2, 3, 4]


def places(figure):
    return [
        tuple(map(float, p.split(","))) for p in re.search(r"points='([^']*)'", figure)[1].split()
    ]


def test_a_curve_is_drawn_in_the_frame_of_its_axes():
    figure = draw(
        Chart("speed", "images/s", [Series("speed", [(0, 10.0), (50, 20.0), (100, 15.0)])])
    )
    (x0, y0), (x1, y1), (x2, y2) = places(figure)
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y2 == pytest.approx(y2 - y1, abs=0.11)
    assert y1 < y2 < y0
    assert ">images/s</text>" in figure
    assert ">step</text>" in figure
    assert ">20</text>" in figure
    assert "last 15, 10 to 20" in figure


def test_a_reported_figure_is_a_line_in_the_range_of_the_chart():
    series = [Series("a", [(0, 10.0), (9, 20.0)])]
    figure = draw(Chart("x", "%", series, levels={"reported": 83.4}))
    assert "reported 83.4" in figure
    line = float(re.search(r"class=level [^>]*y1=([\d.-]+)", figure)[1])
    assert 0 < line < min(y for _, y in places(figure))


@pytest.mark.parametrize(
    "values",
    [
        [(3, 1)],
        [(0, 0), (0, 0)],
        [(1, MAX_VALUE), (MAX_VALUE, -MAX_VALUE)],
        [(0, 1e-300), (1, 2e-300)],
    ],
    ids=["point", "equal", "huge", "tiny"],
)
def test_an_unusual_curve_has_finite_places(values):
    figure = draw(Chart("x", "x", [Series("x", values)]))
    assert "nan" not in figure
    assert "inf" not in figure


def test_values_that_cannot_be_drawn_are_left_out():
    events = [
        {"event": "step", "step": 1, "loss": value} for value in (1.0, None, 1e101, "x", True)
    ]
    events += [{"event": "step", "loss": 1.0}, {"event": "eval", "step": 1, "loss": 5.0}]
    assert points(events, "step", "loss") == [(1.0, 1.0)]


def rows_of(html):
    """Return the cells of each row of a table."""
    rows = re.split(r"<tr>", html)[1:]
    return [re.findall(r"<t[dh][^>]*>([^<]*)", row) for row in rows]


def test_the_most_frequent_confusions_equal_a_sort_of_all_pairs():
    draw_one = random.Random(1)
    n = 50
    matrix = [[float(draw_one.randrange(1000)) for _ in range(n)] for _ in range(n)]
    names = [f"class {i}" for i in range(n)]
    html = confusion(Details(classes=names, confusion=matrix), names, "images")
    assert "50 classes are too many for a readable matrix" in html
    flat = sorted(
        ((matrix[i][j], -i, -j) for i in range(n) for j in range(n) if i != j), reverse=True
    )
    expected = [
        [names[-i], names[-j], f"{count:.0f}", f"{100 * count / sum(matrix[-i]):.1f} %"]
        for count, i, j in flat[:20]
    ]
    assert rows_of(html)[1:] == expected


def test_large_counts_are_shown_as_shares_of_the_row():
    matrix = [[75_000.0, 25_000.0], [0.0, 40.0]]
    html = confusion(Details(classes=["a", "b"], confusion=matrix), ["a", "b"], "pixels")
    assert "per cent of the pixels of the label" in html
    assert [row[1:] for row in rows_of(html.partition("Most")[0])[1:]] == [
        ["75", "25"],
        ["", "100"],
    ]


def test_forty_classes_have_a_matrix_with_names_and_numbers():
    names = [f"kind {i}" for i in range(40)]
    matrix = [[float(i == j) * 50 for j in range(40)] for i in range(40)]
    html = confusion(Details(classes=names, confusion=matrix), names, "images")
    assert html.count("<td") == 40 * 40 + 1
    assert html.count(">50") == 40
    assert "No mistakes." in html


def test_each_column_has_a_table_sorted_by_it():
    rows = [
        {"class": "b", "images": 5, "accuracy": 50.0},
        {"class": "A", "images": 9, "accuracy": None},
        {"class": "c", "images": 7, "accuracy": 20.0},
    ]
    html = sorted_tables(rows, ["class", "images", "accuracy, %"], "accuracy", "classes")
    panes = [rows_of(pane)[1:] for pane in html.split("<div class=pane>")[1:]]
    assert [[row[0] for row in pane] for pane in panes] == [
        ["c", "b", "A"],
        ["A", "b", "c"],
        ["A", "c", "b"],
    ]
    assert panes[0] == [["c", "7", "20.0"], ["b", "5", "50.0"], ["A", "9", "-"]]
    assert html.count(" checked") == 1
    assert "<script" not in html


def test_a_long_text_is_shortened_and_escaped():
    assert text("<b>") == "&lt;b&gt;"
    assert text("x" * 500) == "x" * 299 + "…"


def test_settings_of_recipes_are_compared_by_dotted_name():
    from pale.recipes import get

    one = get("quickstart")
    two = one.override({"optim.lr": 0.5, "name": "other", "about": "other"})
    found = different_settings([one, two, one])
    first = str(one.optim.lr)
    assert found == {"optim.lr": [first, "0.5", first]}
    assert dict(flat_settings({"a": {"b": {"c": 1}}, "d": {}})) == {"a.b.c": 1, "d": {}}
