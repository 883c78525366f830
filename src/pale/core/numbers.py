"""Format numbers for people: thousands separators, and an exponent only for very large and very small values."""

from __future__ import annotations

import math

MAX_PLAIN = 1e15  # larger values are not meaningful


def finite_number(value: object, limit: float = math.inf) -> float | None:
    """Return a value as a float; None for NaN, Inf, other types, and values beyond `limit` on either side."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) <= limit else None


def format_number(value: float, digits: int = 4) -> str:
    """Return a number with `digits` significant digits: 12,345, 0.1235, 3e-5; integers are written in full."""
    if not math.isfinite(value):
        return "NaN or Inf"
    size = abs(value)
    if size < MAX_PLAIN and (value == round(value) or size >= 10 ** (digits - 1)):
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    mantissa, found, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if found else text
