"""A queue and a thread for each model: what arrives together goes through the model together.

Everything but the model's own work happens in the event loop's thread, so nothing here needs a lock. A job whose asker
is gone, by time or by choice, leaves the queue at once; one that has begun is finished and its result is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Generic, TypeVar

from .limits import MOST_SEEN, Limits, RefusedError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Done(Generic[Result]):
    """A result, and how it came about.

    Attributes:
        result: what the model says.
        waited: seconds in the queue.
        worked: seconds of the model, for the whole batch.
        together: items in the batch.
    """

    result: Result
    waited: float
    worked: float
    together: int


@dataclass(eq=False)
class _Job(Generic[Item, Result]):
    item: Item
    size: int  # pixels that the model sees
    future: asyncio.Future[Done[Result]]
    since: float = field(default_factory=perf_counter)


class Worker(Generic[Item, Result]):
    """Takes items, works on them in batches in a thread of its own.

    Args:
        name: of the thread.
        work: results of some items, in their order; an exception is the answer to all of them.
        limits: batch, wait_ms and queue are used.
        noted: is told the size of each batch and the seconds it took.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Item]], Sequence[Result]],
        limits: Limits,
        noted: Callable[[int, float], None] = lambda count, seconds: None,
    ) -> None:
        self._work, self._limits, self._noted = work, limits, noted
        self._waiting: deque[_Job[Item, Result]] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"pale-{name}")
        self._task: asyncio.Task[None] | None = None
        self.reserved = 0  # places of requests whose picture is still being read

    @property
    def depth(self) -> int:
        """Pictures that wait, or are being read to wait."""
        return len(self._waiting) + self.reserved

    def start(self) -> None:
        """Begin to work; call it in the event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End after the batch that is under way; what waits is refused."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._waiting:
            job = self._waiting.popleft()
            if not job.future.done():
                job.future.set_exception(RefusedError(503, "the server is stopping"))
        self._thread.shutdown(wait=True)

    def reserve(self) -> None:
        """Hold a place in the queue, before a body is read; refuse where there is none."""
        if self.depth >= self._limits.queue:
            raise RefusedError(
                429, f"{self._limits.queue} pictures wait already; try again in a moment"
            )
        self.reserved += 1

    def release(self) -> None:
        """Give the place back."""
        self.reserved -= 1

    def submit(self, item: Item, size: int) -> asyncio.Future[Done[Result]]:
        """The result to come; cancelling it drops the job where it has not begun.

        Args:
            item: for `work`.
            size: pixels that the model will see; batches are cut where they sum up to too many.
        """
        future: asyncio.Future[Done[Result]] = asyncio.get_running_loop().create_future()
        job = _Job(item, size, future)
        self._waiting.append(job)
        self._arrived.set()

        def leave(_: object) -> None:
            if future.cancelled() and job in self._waiting:
                self._waiting.remove(job)

        future.add_done_callback(leave)
        return future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            await self._gather()
            jobs = self._take()
            if not jobs:
                continue
            begun = perf_counter()
            items = [job.item for job in jobs]
            try:
                results: Sequence[Result | Exception] = await loop.run_in_executor(
                    self._thread, self._safely, items
                )
            except asyncio.CancelledError:
                for job in jobs:
                    if not job.future.done():
                        job.future.set_exception(RefusedError(503, "the server is stopping"))
                raise
            worked = perf_counter() - begun
            self._noted(len(jobs), worked)
            for job, result in zip(jobs, results, strict=True):
                if job.future.done():
                    continue
                if isinstance(result, Exception):
                    job.future.set_exception(result)
                else:
                    job.future.set_result(Done(result, begun - job.since, worked, len(jobs)))
            # Nothing of a batch may stay in memory while the next is waited for.
            del jobs, items, results, job, result

    async def _gather(self) -> None:
        """Wait until a batch is full, or the first job has waited long enough."""
        while self._waiting and len(self._waiting) < self._limits.batch:
            left = self._waiting[0].since + self._limits.wait_ms / 1000 - perf_counter()
            if left <= 0:
                return
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    def _take(self) -> list[_Job[Item, Result]]:
        jobs: list[_Job[Item, Result]] = []
        seen = 0
        while self._waiting and len(jobs) < self._limits.batch:
            job = self._waiting[0]
            if jobs and seen + job.size > MOST_SEEN:
                break
            self._waiting.popleft()
            if not job.future.done():
                jobs.append(job)
                seen += job.size
        return jobs

    def _safely(self, items: Sequence[Item]) -> Sequence[Result | Exception]:
        """All together; where that fails, one by one, so that one picture does not spoil another's answer."""
        try:
            return self._work(items)
        except Exception as error:
            if len(items) == 1:
                return [error]
            return [result for item in items for result in self._safely([item])]
