"""A queue and a thread for each model: images that arrive together form a batch.

Everything except the work of the model happens in the thread of the event loop, so no lock is needed. A job whose
client has disconnected or timed out leaves the queue at once; a running job is finished and its result is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Generic, TypeVar

from .limits import MAX_MODEL_PIXELS, Limits, RefusedError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Done(Generic[Result]):
    """A result with its timing.

    Attributes:
        result: the result of the model.
        waited: seconds in the queue.
        worked: seconds of the model for the whole batch.
        batch_size: items in the batch.
    """

    result: Result
    waited: float
    worked: float
    batch_size: int


@dataclass(eq=False)
class _Job(Generic[Item, Result]):
    item: Item
    pixels: int  # pixels of the model input
    future: asyncio.Future[Done[Result]]
    on_release: Callable[[], None]
    since: float = field(default_factory=perf_counter)


class Worker(Generic[Item, Result]):
    """Processes items in batches in a thread of its own.

    Args:
        name: name of the thread.
        work: returns the results of items in their order; an exception is the result of all of them.
        limits: batch, wait_ms and queue are used.
        on_batch: called with the size of each batch and its seconds.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Item]], Sequence[Result]],
        limits: Limits,
        on_batch: Callable[[int, float], None] = lambda count, seconds: None,
    ) -> None:
        self._work, self._limits, self._on_batch = work, limits, on_batch
        self._waiting: deque[_Job[Item, Result]] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"pale-{name}")
        self._task: asyncio.Task[None] | None = None
        self.reserved = 0  # places of requests whose image is being decoded

    @property
    def depth(self) -> int:
        """Number of images that wait, or are being decoded to wait."""
        return len(self._waiting) + self.reserved

    def start(self) -> None:
        """Start to work; call it in the event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop after the running batch; refuse all waiting jobs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._waiting:
            job = self._waiting.popleft()
            job.on_release()
            _refuse(job)
        self._thread.shutdown(wait=True)

    def require_room(self, count: int = 1) -> None:
        """Raise RefusedError if the queue has no room for so many images."""
        if self.depth + count > self._limits.queue:
            raise RefusedError(
                429,
                f"the queue is full with {self.depth} images waiting; try again in a moment",
            )

    def reserve(self, count: int = 1) -> None:
        """Hold places in the queue for images that are being decoded; raise RefusedError if there are none."""
        self.require_room(count)
        self.reserved += count

    def release(self, count: int = 1) -> None:
        """Release the places."""
        self.reserved -= count
        self._arrived.set()  # a batch may wait for these images

    def submit(
        self, item: Item, pixels: int, on_release: Callable[[], None] = lambda: None
    ) -> asyncio.Future[Done[Result]]:
        """Queue an item and return its future; cancelling it drops the job unless it is running.

        Args:
            item: argument of `work`.
            pixels: number of pixels of the model input; a batch ends before their sum becomes too large.
            on_release: called once, when the item is no longer held here.
        """
        future: asyncio.Future[Done[Result]] = asyncio.get_running_loop().create_future()
        job = _Job(item, pixels, future, on_release)
        self._waiting.append(job)
        self._arrived.set()

        def drop_if_cancelled(_: object) -> None:
            if future.cancelled() and job in self._waiting:
                self._waiting.remove(job)
                job.on_release()

        future.add_done_callback(drop_if_cancelled)
        return future

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            await self._wait_for_batch()
            if jobs := self._take():
                await self._process(jobs)
            # Keep nothing of a batch in memory while waiting for the next.
            del jobs

    async def _process(self, jobs: list[_Job[Item, Result]]) -> None:
        start = perf_counter()
        loop = asyncio.get_running_loop()
        try:
            results: Sequence[Result | Exception] = await loop.run_in_executor(
                self._thread, self._results, [job.item for job in jobs]
            )
        except asyncio.CancelledError:
            for job in jobs:
                _refuse(job)
            raise
        worked = perf_counter() - start
        self._on_batch(len(jobs), worked)
        for job, result in zip(jobs, results, strict=True):
            job.on_release()
            if job.future.done():
                continue
            if isinstance(result, Exception):
                job.future.set_exception(result)
            else:
                job.future.set_result(Done(result, start - job.since, worked, len(jobs)))

    async def _wait_for_batch(self) -> None:
        """Wait for images that are being decoded, until a batch is full or the first job has waited long enough."""
        while self._waiting and self.reserved and len(self._waiting) < self._limits.batch:
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
        pixels = 0
        while self._waiting and len(jobs) < self._limits.batch:
            job = self._waiting[0]
            if jobs and pixels + job.pixels > MAX_MODEL_PIXELS:
                break
            self._waiting.popleft()
            if job.future.done():
                job.on_release()
            else:
                jobs.append(job)
                pixels += job.pixels
        return jobs

    def _results(self, items: Sequence[Item]) -> Sequence[Result | Exception]:
        """Process all items together; if that fails, one by one, so that one image does not fail the others."""
        try:
            return self._work(items)
        except Exception as error:
            if len(items) == 1:
                return [error]
            return [result for item in items for result in self._results([item])]


def _refuse(job: _Job[Item, Result]) -> None:
    if not job.future.done():
        job.future.set_exception(RefusedError(503, "the server is stopping"))
