"""The groups of rows and columns: their tokens, their pairs, and which calls are errors."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.cases import every_grouping, every_scope, every_size, groups_of, quick

from pale.ops.pale_attention.region import Region

side, pale = st.integers(1, 40), st.integers(1, 9)


@every_scope
@every_grouping
@every_size
def test_members_are_the_tokens_of_each_group_by_definition(h, w, pale_size, scope, grouping):
    region = Region(pale_size, scope, grouping)
    assert region.kinds == (("row", "column") if scope == "parallel" else (scope,))
    rule = {"h": h, "w": w, "pale_size": pale_size, "grouping": grouping}
    for kind in region.kinds:
        members = region.members(kind, h, w)
        for i, j in product(range(h), range(w)):
            actual = members[:, i, j].nonzero().flatten().tolist()
            expected = sorted(set(groups_of(i, j, scope=kind, **rule)))
            assert actual == expected, f"{kind} groups of token {(i, j)}"


@every_scope
@every_grouping
@quick
@given(h=side, w=side, pale_size=st.tuples(pale, pale))
def test_no_group_is_empty_nor_larger_than_the_pale_size(scope, grouping, h, w, pale_size):
    region = Region(pale_size, scope, grouping)
    s_r, s_c = min(pale_size[0], h), min(pale_size[1], w)
    largest = {"row": s_r * w, "column": s_c * h, "pale": s_r * w + s_c * h - s_r * s_c}
    for kind in region.kinds:
        tokens = region.members(kind, h, w).sum((1, 2))
        assert tokens.min() >= 1
        assert tokens.max() <= largest[kind]


@every_scope
@every_grouping
@quick
@given(h=side, w=side, pale_size=st.tuples(pale, pale))
def test_pairs_are_the_squares_of_the_members_summed(scope, grouping, h, w, pale_size):
    region = Region(pale_size, scope, grouping)
    tokens = [region.members(kind, h, w).sum((1, 2)) for kind in region.kinds]
    # Four heads: two of each kind, or all of the one kind.
    expected = sum(4 // len(tokens) * int((n**2).sum()) for n in tokens)
    assert region.pairs(h, w, heads=4) == expected


def test_interlaced_rows_of_a_group_are_equally_spaced():
    row, column = Region((3, 2)).groups(7, 5)
    assert row.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert column.tolist() == [0, 1, 2, 0, 1]


def test_contiguous_rows_of_a_group_are_neighbours():
    row, column = Region((3, 2), grouping="contiguous").groups(7, 5)
    assert row.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert column.tolist() == [0, 0, 1, 1, 2]


def test_interlaced_pales_count_both_directions_with_the_larger_number():
    # ceil(7 / 3) = 3 groups of rows, ceil(9 / 2) = 5 of columns: five pales, three of one row.
    region = Region((3, 2), scope="pale")
    assert region.counts(7, 9) == (5, 5)
    row, column = region.groups(7, 9)
    assert row.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert column.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_pairs_of_a_pale_follow_the_formula_of_the_paper_where_sizes_divide():
    s, h, n = 7, 56, 8
    assert Region((s, s), scope="pale").pairs(h, h, heads=1) == n * (2 * s * h - s * s) ** 2
    assert Region((s, s), scope="parallel").pairs(h, h, heads=2) == 2 * n * (s * h) ** 2


def test_groups_and_members_are_on_the_device_that_was_asked_for():
    region, device = Region((3, 2)), torch.device("meta")
    found = [*region.groups(7, 5, device), region.members("row", 7, 5, device)]
    assert [x.device for x in found] == [device] * 3


@pytest.mark.parametrize(
    "pale_size",
    [(0, 7), (7, 0), (-1, 7), (7.0, 7), [7, 7], (7,), (7, 7, 7), (True, 7), 7, None, ("7", "7")],
    ids=repr,
)
def test_pale_size_must_be_two_whole_numbers_of_at_least_one(pale_size):
    with pytest.raises(
        ValueError,
        match=r"^pale_size must be \(s_r, s_c\), two whole numbers of at least 1, got .*; use",
    ) as error:
        Region(pale_size)
    assert f"got {pale_size!r};" in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"scope": "rows"},
            r"^scope must be one of parallel, row, column, pale, got 'rows'; did you mean 'row'\?$",
        ),
        (
            {"scope": "columns"},
            r"^scope must be one of .*, got 'columns'; did you mean 'column'\?$",
        ),
        ({"scope": "xyz"}, r"^scope must be one of parallel, row, column, pale, got 'xyz'$"),
        ({"scope": None}, r"^scope must be one of parallel, row, column, pale, got None$"),
        (
            {"grouping": "interlace"},
            r"^grouping must be one of interlaced, contiguous, got 'interlace'; "
            r"did you mean 'interlaced'\?$",
        ),
        ({"grouping": 7}, r"^grouping must be one of interlaced, contiguous, got 7$"),
    ],
    ids=lambda x: "=".join(map(str, *x.items())) if isinstance(x, dict) else "",
)
def test_unknown_words_are_errors_that_name_the_nearest_one(words, message):
    with pytest.raises(ValueError, match=message):
        Region((7, 7), **words)
