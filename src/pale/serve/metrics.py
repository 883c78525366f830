"""Numbers for Prometheus, in a registry of the server's own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """What a server has done; tasks and statuses are the only labels, so there are few series."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        labels = ["kind", "task"]
        self.requests = Counter(
            "pale_requests",
            "Requests, by what was asked (predict, look), task and status; 499: the client went away",
            [*labels, "status"],
            registry=registry,
        )
        self.latency = Histogram(
            "pale_request_seconds",
            "From a request's beginning to its answer, of those that were answered",
            labels,
            buckets=SECONDS,
            registry=registry,
        )
        self.model = Histogram(
            "pale_model_seconds", "A batch in its model", labels, buckets=SECONDS, registry=registry
        )
        self.batches = Histogram(
            "pale_batch_pictures", "Pictures in a batch", labels, buckets=COUNTS, registry=registry
        )
        self.queue = Gauge(
            "pale_queue_pictures", "Pictures that wait for a model", labels, registry=registry
        )

    def watch(self, kind: str, task: str, depth: Callable[[], int]) -> Callable[[int, float], None]:
        """Take a queue's depth when it is asked for; returns what to call after each batch."""
        self.queue.labels(kind, task).set_function(depth)
        batches, model = self.batches.labels(kind, task), self.model.labels(kind, task)

        def noted(count: int, seconds: float) -> None:
            batches.observe(count)
            model.observe(seconds)

        return noted

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)
