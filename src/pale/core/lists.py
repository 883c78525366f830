"""Short lists in messages."""

from __future__ import annotations

from collections.abc import Sequence


def list_first(items: Sequence[str], count: int) -> str:
    """Return the first items and the number of the others: "a, b and 7 more"."""
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return ", ".join(items[:count]) + more


def first_of(problems: Sequence[str], others: str = "more") -> str:
    """Return the first problem and the number of the others: "a.jpg is damaged (and 7 more)"."""
    count = len(problems) - 1
    return f"{problems[0]} (and {count} {others})" if count else problems[0]
