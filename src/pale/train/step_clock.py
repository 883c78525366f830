"""Time of the training steps between two log entries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


class StepClock:
    """Measures steps and seconds since the last log entry; evaluation and saving are paused.

    Only time is paused: the steps before and after a pause count, each with its own time. An entry after an
    evaluation therefore has the throughput of its steps, independent of the time of the evaluation.

    Args:
        step: steps done when the clock starts.
    """

    def __init__(self, step: int) -> None:
        self.step, self.began, self.pauses = step, monotonic(), 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the block."""
        start = monotonic()
        try:
            yield
        finally:
            self.pauses += monotonic() - start

    def lap(self, step: int) -> tuple[int, float]:
        """Return the steps and the seconds since the last call, and start again at `step`."""
        now = monotonic()
        done, seconds = step - self.step, max(now - self.began - self.pauses, 1e-9)
        self.step, self.began, self.pauses = step, now, 0.0
        return done, seconds
