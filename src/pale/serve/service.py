"""The state that all requests share: models, queues, memory budgets, metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from PIL import Image
from torch import Tensor

from .. import __version__
from ..view.attention import BackboneTrace
from .batching import Worker
from .body import Body
from .limits import TRIM_BYTES, Budget, Limits, memory_trimmer
from .metrics import Metrics
from .models import Models, Prepared

DECODERS = max(2, min(8, os.cpu_count() or 2))  # threads
TRIM_DELAY = 0.5  # seconds


class Service:
    """The models with their queues, and everything else that requests share.

    Args:
        models: the models to serve.
        limits: limits of the server.
    """

    def __init__(self, models: Models, limits: Limits) -> None:
        self.models, self.limits, self.metrics = models, limits, Metrics()
        models.workspace()  # measure it now, not during a request
        self.budget, self.upload_budget = (
            Budget(limits.request_memory),
            Budget(limits.upload_memory),
        )
        self.bodies: set[Body] = set()
        self.stopping = False  # set at SIGTERM, before the server stops accepting requests
        self._trim = memory_trimmer()
        self._trimming: asyncio.TimerHandle | None = None
        self.decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="pale-decode")
        self.predicting: dict[str, Worker[Prepared | Tensor, Any]] = {}
        self.tracing: dict[str, Worker[Image.Image, BackboneTrace]] = {}

    def start(self) -> None:
        """Start the queues; call it in the event loop."""
        for name, predictor in self.models.predictors.items():
            watch = partial(self.metrics.watch, task=predictor.task, model=name)
            on_batch = watch("predict", depth=partial(self._queue_depth, name))
            work = partial(self.models.run, name)
            self.predicting[name] = Worker(name, work, self.limits, on_batch)
            self.predicting[name].start()
            if self.models.can_trace(name):
                self._start_tracing(name, watch)

    def _start_tracing(self, name: str, watch: Callable[..., Callable[[int, float], None]]) -> None:
        def work(items: Sequence[Image.Image]) -> list[BackboneTrace]:
            return [self.models.trace(name, item) for item in items]

        on_batch = watch("look", depth=lambda: self.tracing[name].depth)
        limits = Limits(batch=1, wait_ms=0, queue=self.limits.queue)
        self.tracing[name] = Worker(f"look-{name}", work, limits, on_batch)
        self.tracing[name].start()

    def _queue_depth(self, name: str) -> int:
        return self.predicting[name].depth

    @property
    def status(self) -> str:
        """ready, or stopping after SIGTERM."""
        return "stopping" if self.stopping else "ready"

    def trim_soon(self) -> None:
        """Return memory to the system soon after large images, once none of them is in use."""
        if self._trimming is None and self.budget.freed >= TRIM_BYTES:
            self._schedule_trim()

    def _schedule_trim(self) -> None:
        self.budget.freed = 0
        self._trimming = asyncio.get_running_loop().call_later(TRIM_DELAY, self._trim_now)

    def _trim_now(self) -> None:
        self._trimming = None
        self.decoders.submit(self._trim)
        # What was freed while this call was pending may still have been referenced: trim once more.
        if self.budget.freed:
            self._schedule_trim()

    async def stop(self) -> None:
        """Stop the queues and threads."""
        if self._trimming is not None:
            self._trimming.cancel()
        for predicting in self.predicting.values():
            await predicting.stop()
        for tracing in self.tracing.values():
            await tracing.stop()
        self.decoders.shutdown(wait=True, cancel_futures=True)

    def about(self) -> dict[str, Any]:
        """Return the state for /health."""
        limits = self.limits
        return {
            "status": self.status,
            "version": __version__,
            "device": self.models.device,
            "models": self.models.about(),
            "served": self.models.about_all(),
            "least_score": self.models.score,  # kept name
            "limits": {
                "max_upload_mb": limits.max_upload_mb,
                "max_pixels": limits.pixels,
                "batch": limits.batch,
                "queue": limits.queue,
                "timeout": limits.timeout,
                "memory_mb": limits.memory_mb,
                "model_memory_mb": round(self.models.workspace() / 1e6, 1),
            },
        }
