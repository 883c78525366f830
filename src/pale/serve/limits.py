"""What one server takes on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, fields

# Pixels that go through a model at once: a batch is cut there, and a picture that a model sees larger is refused.
MOST_SEEN = 4_000_000
LARGEST_AT_ONCE = 4  # pictures of the very largest kind that memory is set aside for
MUCH = 64_000_000  # bytes, after whose release memory is given back to the system


@dataclass(frozen=True)
class Limits:
    """Bounds of a server; beyond them it refuses, in words.

    Attributes:
        batch: pictures that go through a model together, at most.
        wait_ms: how long the first of them waits for others.
        queue: pictures that may wait for a model.
        timeout: seconds from the first byte of a request to its answer.
        max_upload_mb: megabytes of a body.
        max_pixels: of a decoded picture.
    """

    batch: int = 8
    wait_ms: float = 5.0
    queue: int = 64
    timeout: float = 30.0
    max_upload_mb: float = 20.0
    max_pixels: int = 50_000_000

    def __post_init__(self) -> None:
        least = {"wait_ms": 0}
        for field in fields(self):
            value, bound = getattr(self, field.name), least.get(field.name, 1)
            if field.name in ("timeout", "max_upload_mb"):
                if not value > 0:
                    raise ValueError(f"{field.name} must be above 0, got {value:g}")
            elif not value >= bound:
                raise ValueError(f"{field.name} must be at least {bound}, got {value:g}")

    @property
    def max_upload(self) -> int:
        """Bytes of a body."""
        return int(self.max_upload_mb * 1_000_000)

    @property
    def memory(self) -> int:
        """Bytes of bodies and decoded pictures that may be held at once."""
        return LARGEST_AT_ONCE * (self.max_upload + 4 * self.max_pixels)


class RefusedError(Exception):
    """A request that gets no result: the status and the words of its answer."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


class Budget:
    """Bytes that requests hold at once; used in one thread alone."""

    def __init__(self, total: int) -> None:
        self.total, self.used, self._freed = total, 0, 0

    def take(self, count: int) -> None:
        """Set bytes aside, or refuse."""
        if self.used + count > self.total:
            raise RefusedError(
                429, "too many large pictures are being worked on; try again in a moment"
            )
        self.used += count

    def give(self, count: int) -> None:
        """They are free again."""
        self.used -= count
        self._freed += count

    def much_was_freed(self) -> bool:
        """Whether much was given back since this was last true."""
        much = self._freed >= MUCH
        if much:
            self._freed = 0
        return much


class Share:
    """What one request holds of a budget; leaving the `with` block gives it back."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._held = budget, 0

    def take(self, count: int) -> None:
        """Hold more, or be refused."""
        self._budget.take(count)
        self._held += count

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.give(self._held)


def trimmer() -> Callable[[], object]:
    """What gives free memory back to the system: glibc keeps that of large pictures, for each thread its own."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # another C library
        return lambda: None
    return lambda: trim(0)
