"""The server process: bind a socket, run uvicorn, stop on a signal."""

from __future__ import annotations

import gc
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from PIL import Image

from ..errors import SettingsError
from .app import create_app
from .guard import check_token
from .hosts import allowed_hosts, exposure_warning
from .models import Models
from .protocol import Protocol
from .settings import ServeSettings

BACKLOG = 1024
KEEP_ALIVE = 5  # seconds that an idle connection stays open
# Called with the address of the page, the device, and the result of `Models.about`.
OnStart = Callable[[str, str, dict[str, dict[str, Any]]], None]


def serve(settings: ServeSettings, on_start: OnStart, warn: Callable[[str], None]) -> None:
    """Load the models and serve them until SIGTERM or Ctrl-C.

    Args:
        settings: models, address and limits.
        on_start: called when the server accepts requests.
        warn: called with each warning about the models or the address.
    """
    if (token := settings.find_token()) is not None:
        check_token(token)
    with closing(bind(settings.host, settings.port)) as listening:
        models = Models(
            settings.weights,
            device=settings.device,
            batch=settings.batch,
            top=settings.top,
            score=settings.score,
        )
        for predictor in models.predictors.values():
            if (warning := predictor.loaded.warning) is not None:
                warn(warning)
        models.warm_up()
        if (warning := exposure_warning(settings.host, token is not None)) is not None:
            warn(warning)
        hosts = allowed_hosts(settings.host, settings.allow_host)
        app = create_app(models, settings, hosts, token)
        started = partial(on_start, url(listening), models.device, models.about())
        delay = settings.stop_delay
        run(app, listening, started, settings.timeout, settings.access_log, delay)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket to listen on; call it before models are loaded, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only with this protocol; without it a body waits 40 ms for the client's delayed ACK.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"cannot listen on {host} port {port} ({reason}); choose another --port, or 0 for any free one"
        ) from None
    return listening


def url(listening: socket.socket) -> str:
    """Return the address of the page."""
    host, port = listening.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def run(
    app: FastAPI,
    listening: socket.socket,
    on_start: Callable[[], None],
    drain: float,
    access_log: bool = False,
    stop_delay: float = 0,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the running requests.

    Args:
        app: the result of `create_app`.
        listening: the result of `bind`.
        on_start: called when the server accepts requests.
        drain: seconds that running requests may still take.
        access_log: print a line for each request.
        stop_delay: seconds after SIGTERM in which requests are still accepted, but readiness is off already.
    """
    # Our limit on pixels is lower than Pillow's. Its warnings about damaged metadata would only fill the log.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="PIL")
    gc.freeze()  # models and modules exist as long as the process, so garbage collection can skip them

    def on_stop() -> None:
        app.state.service.stopping = True

    config = configure(app, drain, access_log)
    Server(config, on_start, on_stop, stop_delay).run(sockets=[listening])


def configure(app: FastAPI, drain: float, access_log: bool = False) -> uvicorn.Config:
    """Return uvicorn's settings: limited connections, no websockets, no header that names the server."""
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(drain)),
    )


class Server(uvicorn.Server):
    """uvicorn's server, with callbacks on start and stop, and with exit code 0 after SIGINT or SIGTERM.

    Args:
        config: uvicorn's settings.
        on_start: called when the server accepts requests.
        on_stop: called at the first signal, before the server stops accepting requests.
        stop_delay: seconds between SIGTERM and that.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_start: Callable[[], None],
        on_stop: Callable[[], None] = lambda: None,
        stop_delay: float = 0,
    ) -> None:
        super().__init__(config)
        self._on_start, self._on_stop, self._stop_delay = on_start, on_stop, stop_delay
        self._stop_at: float | None = None  # on time.monotonic

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then call `on_start`."""
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop; called ten times per second."""
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.should_exit = True
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGINT, and after the delay at SIGTERM; at a second signal, do not wait for the delay."""

        def stop(number: int, frame: FrameType | None) -> None:
            self._on_stop()
            if number == signal.SIGTERM and self._stop_delay and self._stop_at is None:
                self._stop_at = time.monotonic() + self._stop_delay
            else:
                self.handle_exit(number, frame)

        before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
