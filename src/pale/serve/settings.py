"""Settings of a server. This module imports nothing heavy, so that `pale serve --help` is fast."""

from __future__ import annotations

import os
from typing import Literal

from ..core.options import option, settings_class
from ..errors import SettingsError
from .hosts import TOKEN
from .limits import Limits

MAX_STOP_DELAY = 3600  # seconds


@settings_class
class ServeSettings(Limits):
    """Models, address and limits of a server."""

    weights: list[str] = option(
        "run folder or .safetensors file of a run, or NAME=MODEL to name it; repeat it for further models",
        default=[],
        metavar="MODEL",
        repeated=True,
    )
    host: str = option("address to listen on", default="127.0.0.1")
    port: int = option("port to listen on, 0 for any free one", default=8000)
    allow_host: list[str] = option(
        "additional host name that requests may use, for a server behind a proxy",
        default=[],
        metavar="NAME",
        repeated=True,
    )
    token: str | None = option(
        "token that requests must carry (Authorization: Bearer TOKEN), at least 16 characters; better set it in the "
        f"environment as {TOKEN}, because all users of the machine can see options. The page asks for it; /health "
        "needs none, but then reports only that the server is ready",
        default=None,
    )
    device: Literal["cpu", "cuda"] | None = option(
        "device (default: cuda if available)", default=None
    )
    top: int = option("classifiers: number of classes per image", default=5)
    score: float = option("detectors: score threshold", default=0.5)
    stop_delay: float = option(
        "seconds after SIGTERM in which requests are still accepted while /v2/health/ready fails, so that a load "
        "balancer stops sending requests",
        default=0,
        metavar="S",
    )
    access_log: bool = option("print a line for each request", default=False)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if not 0 <= self.stop_delay <= MAX_STOP_DELAY:
            raise SettingsError(
                f"stop_delay must be from 0 to {MAX_STOP_DELAY}, got {self.stop_delay:g}"
            )

    def find_token(self) -> str | None:
        """Return the token that was given, or that of the environment; None for a server without one."""
        return self.token if self.token is not None else os.environ.get(TOKEN) or None
