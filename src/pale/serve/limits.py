"""Limits of a server on batches, time, uploads and memory."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from threading import Lock

from ..core.options import option, settings_class
from ..errors import SettingsError

# Pixels that go through a model at once: a batch is cut there, and an image that is larger for the model is refused.
MAX_MODEL_PIXELS = 4_000_000
UPLOAD_SHARE = 0.15  # of the memory: bodies that are being received
MIN_BODIES = 2  # of the maximum size that this share must hold
MIN_RATE, RATE_SECONDS = 4_000, 5.0  # bytes per second of a body, averaged over this window
# From the connection, or the first byte of a further request, to the end of its headers.
HEADER_SECONDS = 10.0
WRITE_SECONDS = 10.0  # in which a client must read about 50 kB of a response
MAX_CONNECTIONS = (
    512  # above it, the connection that has waited longest without a request is closed
)
BODY_COPIES = 2.25  # bytes held per byte of a body: the growing buffer and its copy
TRIM_BYTES = 64_000_000  # freed bytes after which memory is returned to the system
MINIMA = {"batch": 1, "wait_ms": 0, "queue": 1, "max_pixels": 1}


@settings_class
class Limits:
    """Limits of a server; a request beyond them is refused with a reason."""

    batch: int = option("maximum number of images per batch", default=8)
    wait_ms: float = option(
        "how long the first image of a batch waits for others", default=5, metavar="MS"
    )
    queue: int = option("maximum number of waiting images per model", default=64)
    timeout: float = option("timeout of a request in seconds", default=30, metavar="S")
    max_upload_mb: float = option("maximum size of a file", default=20, metavar="MB")
    max_pixels: float = option("maximum number of pixels of an image", default=50e6, metavar="N")
    memory_mb: float = option(
        "memory for all requests together: bodies, decoded images, results (default 2000). The models need memory in "
        "addition, which is measured at the start; /health reports both; the process stays within 25 % of their sum",
        default=2000,
        metavar="MB",
    )

    def __post_init__(self) -> None:
        """Check the values."""
        for name, minimum in MINIMA.items():
            if not getattr(self, name) >= minimum:
                raise SettingsError(
                    f"{name} must be at least {minimum}, got {getattr(self, name):g}"
                )
        for name in ("timeout", "max_upload_mb", "memory_mb"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be above 0, got {getattr(self, name):g}")
        min_memory_mb = MIN_BODIES * BODY_COPIES * self.max_upload_mb / UPLOAD_SHARE
        if not self.memory_mb >= min_memory_mb:
            raise SettingsError(
                f"memory_mb must be at least {min_memory_mb:g} to receive files of {self.max_upload_mb:g} MB, "
                f"got {self.memory_mb:g}; raise it or lower max_upload_mb"
            )

    @property
    def pixels(self) -> int:
        """Maximum number of pixels of a decoded image."""
        return int(self.max_pixels)

    @property
    def max_upload(self) -> int:
        """Maximum size of a body in bytes."""
        return int(self.max_upload_mb * 1_000_000)

    @property
    def upload_memory(self) -> int:
        """Bytes that bodies may hold while they are received."""
        return int(UPLOAD_SHARE * self.memory_mb * 1_000_000)

    @property
    def request_memory(self) -> int:
        """Bytes that requests may hold after their body has been received."""
        return int((1 - UPLOAD_SHARE) * self.memory_mb * 1_000_000)


class RefusedError(Exception):
    """A request that gets no result: the HTTP status and the message of its response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Budget:
    """Bytes that requests hold at the same time; threads may take, only that of the event loop gives."""

    def __init__(self, total: int) -> None:
        self.total, self.used, self.freed = total, 0, 0
        self._lock = Lock()

    def take(self, count: int, held: int = 0) -> None:
        """Reserve bytes or raise RefusedError; `held` is what the request holds already."""
        if held + count > self.total:
            raise RefusedError(
                413,
                f"this image needs {(held + count) / 1e6:,.0f} MB of memory, and the server may use "
                f"{self.total / 1e6:,.0f} MB; make the image smaller, save it as JPEG, or start the server with a "
                "larger --memory-mb",
            )
        with self._lock:
            if self.used + count > self.total:
                raise RefusedError(
                    429, "too many large images are being processed; try again in a moment"
                )
            self.used += count

    def give(self, count: int) -> None:
        """Release bytes."""
        with self._lock:
            self.used -= count
        self.freed += count


class Share:
    """The part of a budget that one request holds until its last user (request, thread, model) has left."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._held, self._users = budget, 0, 1

    def take(self, count: int) -> None:
        """Reserve more bytes or raise RefusedError."""
        self._budget.take(count, self._held)
        self._held += count

    def enter(self) -> None:
        """Add a user."""
        self._users += 1

    def leave(self) -> None:
        """Remove a user; the last one releases all bytes."""
        self._users -= 1
        if not self._users:
            self._budget.give(self._held)
            self._held = 0


def memory_trimmer() -> Callable[[], object]:
    """Return a function that frees the remains of requests and returns that memory to the system.

    An image that failed to decode is kept alive by its exception, in a reference cycle, and glibc keeps the memory of
    freed images in an arena per thread.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # another C library
        return gc.collect
    return lambda: (gc.collect(), trim(0))
