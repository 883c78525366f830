"""YAML of plain values. A file may come from anyone, so its structure is bounded before values are built."""

from __future__ import annotations

from typing import Any

import yaml

MAX_DEPTH = 20  # of nested values
MAX_SCALAR = 10_000  # characters of a value
MAX_VALUES = 100_000  # of a document; each takes some 20 microseconds and 3 kB


class _Loader(yaml.SafeLoader):
    """YAML loader for plain values without aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, which turn a few lines into gigabytes, long scalars and deep nesting."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"aliases (*{event.anchor}) are not supported; write the value")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR:
            raise yaml.YAMLError(f"a value has {len(event.value)} characters, at most {MAX_SCALAR}")
        self.values = getattr(self, "values", 0) + 1
        if self.values > MAX_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_VALUES:,} values")
        self.depth = getattr(self, "depth", 0) + 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"values are nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def load_yaml(content: bytes) -> Any:
    """Return the values of a document, or raise a `ValueError` with the reason in one line."""
    try:
        return yaml.load(content.decode(), _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())[:400]) from None
