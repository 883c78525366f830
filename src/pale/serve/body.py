"""Memory of the bodies that are being received."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import perf_counter

from .limits import BODY_COPIES, Budget, RefusedError

CROWDED = "too many bodies are being received; try again in a moment"


class Body:
    """A body that is being received, and the memory that it holds.

    Bodies share a budget of their own. When it is used up, the slowest body is refused, so that slow clients cannot
    block others.
    """

    def __init__(self, budget: Budget, others: set[Body]) -> None:
        self._budget, self._others, self._held = budget, others, 0
        self._start, self._size = perf_counter(), 0
        self.timeout: asyncio.Timeout | None = None  # timeout of the next part
        self.displaced = False
        others.add(self)

    @property
    def rate(self) -> float:
        """Bytes per second so far."""
        return self._size / (perf_counter() - self._start + 0.1)

    def received(self, count: int) -> None:
        """Hold the memory of further bytes, or raise RefusedError."""
        self._size += count
        needed = int(BODY_COPIES * count)
        if self._budget.used + needed > self._budget.total:
            slowest = min((b for b in self._others if not b.displaced), key=lambda b: b.rate)
            slowest.displace()
            if slowest is self:
                raise RefusedError(429, CROWDED)
        # The memory of the displaced body is released shortly; until then the budget is exceeded by one part.
        self._budget.used += needed
        self._held += needed

    def displace(self) -> None:
        """Refuse this body: end the wait for its next part."""
        self.displaced = True
        if self.timeout is not None:
            with suppress(RuntimeError):  # it is expiring right now
                self.timeout.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Release its memory."""
        self._others.discard(self)
        self._budget.give(self._held)
        self._held = 0
