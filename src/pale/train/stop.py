"""Signals that request a run to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class StopSignals:
    """Record SIGTERM and the first Ctrl-C instead of ending the process; a second Ctrl-C ends it immediately."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: int | None = None
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.handlers = {s: signal.signal(s, self._on_signal) for s in self.SIGNALS}
        return self

    def _on_signal(self, which: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and which == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = which

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for which, handler in self.handlers.items():
            signal.signal(which, handler)
