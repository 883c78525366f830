"""JSON of plain values, which may come from anyone."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]  # a JSON object


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from a file; raise `ValueError` if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
