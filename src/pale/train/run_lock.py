"""Lock of a run folder, so that two runs cannot use it: an exclusive `flock` on its file `.lock`.

The system releases the lock when the process ends, for any reason. Rank 0 of a run holds it. On NFS it works between
machines if the mount supports locks (NFSv4 does; `nolock` and `local_lock` do not). A file system without locks is
reported by a warning.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..core.plain_json import parse_json
from ..errors import RunError
from .distributed import World

if sys.platform != "win32":
    import fcntl

NAME = ".lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
HOLDER_BYTES = 4096


class RunLockedError(RunError):
    """Another process, which the message names, uses the run folder."""


class UnlockedRunWarning(UserWarning):
    """The run folder cannot be locked."""


_held: set[int] = set()
_watching: list[bool] = []


@contextmanager
def run_lock(run: Path, world: World) -> Iterator[None]:
    """Create a run folder if needed and hold its lock; raise on all processes if it is locked."""
    created, descriptor = world.on_main(lambda: _create(run))
    try:
        yield
    finally:
        if world.main:
            if descriptor is not None:
                _release(run, descriptor)
            with suppress(OSError):  # the run has written something
                for folder in created:
                    folder.rmdir()


def _create(run: Path) -> tuple[list[Path], int | None]:
    """Create and lock the folder; return the folders created, inner ones first, and the descriptor of the lock."""
    created = [folder for folder in (run, *run.parents) if not folder.exists()]
    run.mkdir(parents=True, exist_ok=True)
    return created, acquire(run)


def acquire(run: Path) -> int | None:
    """Lock a run folder and return the descriptor of the lock; None if it cannot be locked."""
    if sys.platform == "win32":
        return None
    path = run / NAME
    while True:
        # Do not follow a link, and do not block on a named pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = _locked_message(run, descriptor)
            os.close(descriptor)
            raise RunLockedError(message) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(
                f"{run} cannot be locked ({error.strerror}): make sure that no other process trains in it",
                UnlockedRunWarning,
                stacklevel=2,
            )
            return None
        if _is_same_file(path, descriptor):
            break
        os.close(descriptor)  # the previous process has just removed it
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(about).encode(), 0)
    _close_in_children(descriptor)
    return descriptor


def _release(run: Path, descriptor: int) -> None:
    (run / NAME).unlink(
        missing_ok=True
    )  # while it is locked, so that no other process has replaced it
    _held.discard(descriptor)
    os.close(descriptor)


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        there, own = path.lstat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


def _locked_message(run: Path, descriptor: int) -> str:
    try:
        about = parse_json(os.pread(descriptor, HOLDER_BYTES, 0))
        holder = f"process {int(about['pid'])} on {about['host']!r} since {about['since']!r}"
    except (OSError, ValueError, KeyError, TypeError):
        holder = "another process"
    return (
        f"{run} is in use by {holder}; two processes in one folder would damage it: wait for that process, stop "
        "it, or choose another folder: --output DIR"
    )


def _close_in_children(descriptor: int) -> None:
    """Close the descriptor in forked processes, such as data loading workers, which could outlive this process."""
    _held.add(descriptor)
    if not _watching:
        _watching.append(True)
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()
