"""Write the files of a run while training continues, and retry after temporary failures of the file system.

A job is a function that writes files from a copy of the state. Jobs run in one thread, one after the other. If a job
fails, the thread pauses and repeats it, for as long as `patience` allows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .checkpoint import WRITE_FAILURES

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between two attempts of a job


@dataclass(frozen=True)
class _Job:
    name: str
    write: Callable[[], None]
    done: Callable[[], None]


class BackgroundWriter:
    """Run jobs that write files in a thread.

    Args:
        patience: seconds for which writing may fail before `check` and `wait` raise the error.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.jobs: list[_Job] = []  # the first one is running or retried
        self.finished: list[_Job] = []
        self.messages: list[str] = []
        self.error: Exception | None = None
        self.failing_since: float | None = None
        self.pause = FIRST_PAUSE
        self.running = False
        self.hurry = False
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def submit(
        self, name: str, write: Callable[[], None], done: Callable[[], None] = lambda: None
    ) -> None:
        """Add a job to the queue of the thread.

        If an older job of this name is still in the queue, the call waits for it; while writing fails, the older job
        is replaced. So at most two copies of a state are in memory, and training waits for a slow disk, but not for an
        unavailable one.

        Args:
            name: name of the job, for messages.
            write: writes the files; called in the thread.
            done: called by `check` or `wait`, in their thread, after `write` has succeeded.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self._must_wait_for(name))
            self.jobs = [job for job in self.jobs if job.name != name]
            self.jobs.append(_Job(name, write, done))
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="pale-writer", daemon=True)
                self.thread.start()

    def check(self) -> list[str]:
        """Call `done` of finished jobs and return messages about new failures; raise when patience has ended."""
        with self.changed:
            finished, self.finished = self.finished, []
            messages, self.messages = self.messages, []
            error = self.error
        for job in finished:
            job.done()
        if error is not None:
            raise error
        return messages

    def wait(self) -> list[str]:
        """Wait until everything is written; otherwise like `check`."""
        with self.changed:
            self.hurry = True  # training has nothing else to do
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.jobs or self.error is not None)
        return self.check()

    def drain(self) -> None:
        """Wait until everything is written or an attempt fails; raise nothing."""
        with self.changed:
            self.changed.wait_for(lambda: not self.jobs or self.failing_since is not None)

    def _must_wait_for(self, name: str) -> bool:
        if self.error is not None or all(job.name != name for job in self.jobs):
            return False
        return self.failing_since is None or (self.running and self.jobs[0].name == name)

    def _run(self) -> None:
        """Run jobs until there are none."""
        while (job := self._next()) is not None:
            error = None
            try:
                job.write()
            except Exception as caught:
                error = caught
            with self.changed:
                self.running = False
                self._record(job, error)
                self.changed.notify_all()

    def _next(self) -> _Job | None:
        """Return the next job, after the pause if the last attempt failed."""
        with self.changed:
            if self.failing_since is not None and self.error is None:
                self.changed.wait_for(lambda: self.hurry, self.pause)
                self.hurry = False
                self.pause = min(2 * self.pause, LONGEST_PAUSE)
            if not self.jobs or self.error is not None:
                self.thread = None
                return None
            self.running = True
            return self.jobs[0]

    def _record(self, job: _Job, error: Exception | None) -> None:
        if error is None:
            self.failing_since, self.pause = None, FIRST_PAUSE
            self.jobs.remove(job)
            self.finished.append(job)
            return
        now = time.monotonic()
        if self.failing_since is None:
            self.failing_since = now
        if not isinstance(error, WRITE_FAILURES) or now - self.failing_since >= self.patience:
            self.error = error
            return
        self.messages.append(
            f"{job.name} could not be written ({error.__cause__ or error}); training continues, and the next attempt "
            f"is in {self.pause:.0f} s"
        )


def copy_to_cpu(value: object) -> Any:
    """Return a copy of a state whose tensors are on the CPU and share no memory with it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return type(value)((name, copy_to_cpu(inner)) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return type(value)(copy_to_cpu(inner) for inner in value)
    return value
