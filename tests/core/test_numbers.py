import math

import pytest

from pale.core.numbers import finite_number, format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10_000.0, "10,000"),
        (10_000, "10,000"),
        (1_281_167.0, "1,281,167"),
        (14_023.71, "14,024"),
        (0.0, "0"),
        (-3.0, "-3"),
        (83.41999, "83.42"),
        (0.00123456, "0.001235"),
        (0.00001, "1e-5"),
        (2.345e-7, "2.345e-7"),
        (1e300, "1e300"),
        (math.nan, "NaN or Inf"),
        (-math.inf, "NaN or Inf"),
    ],
)
def test_a_number_is_written_for_people(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize("value", [None, True, "1", [], math.nan, math.inf, 10**400, -1e9])
def test_what_is_not_a_usable_number_is_none(value):
    assert finite_number(value, limit=1e8) is None


def test_a_usable_number_is_a_float():
    assert finite_number(3) == 3.0
    assert isinstance(finite_number(3), float)
