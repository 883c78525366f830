"""The server as a process: binds, tells its address, stops when it is asked to."""

from __future__ import annotations

import signal
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from PIL import Image

BACKLOG = 1024
KEEP_ALIVE = 5  # seconds that an idle connection stays open


def bind(host: str, port: int) -> socket.socket:
    """A socket to listen on; before models are loaded, so that a port in use is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot listen on {host} port {port} ({reason}); choose another --port, or 0 for any that is free"
        ) from None
    return listening


def url(listening: socket.socket) -> str:
    """Where the page is."""
    host, port = listening.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def run(
    app: FastAPI,
    listening: socket.socket,
    started: Callable[[], None],
    drain: float,
    access_log: bool = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what is under way.

    Args:
        app: what `create_app` made.
        listening: what `bind` made.
        started: is called when requests are taken.
        drain: seconds that requests under way may still take.
        access_log: a line for each request.
    """
    # The bound on pixels is ours, and lower.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    config = uvicorn.Config(
        app,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(drain)),
    )
    Server(config, started).run(sockets=[listening])


class Server(uvicorn.Server):
    """uvicorn's, but to be asked to stop is no failure: the exit code is 0; and it says when it is ready."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._told = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then tell."""
        await super().startup(sockets)
        if self.started:
            self._told()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGINT and SIGTERM; at a second SIGINT, at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            self.handle_exit(number, frame)

        before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
