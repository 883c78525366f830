"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Stopper:
    """Turns SIGTERM and the first Ctrl-C into a wish to stop; a second Ctrl-C stops at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.asked: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self._on_signal) for s in self.SIGNALS}
        return self

    def _on_signal(self, which: int, frame: FrameType | None) -> None:
        if self.asked == signal.SIGINT and which == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = which

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for which, handler in self.before.items():
            signal.signal(which, handler)
