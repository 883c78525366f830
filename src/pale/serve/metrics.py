"""Prometheus metrics, in a registry of the server."""

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
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """Counters of a server; the labels are route, task, model and status, so there are few time series."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        labels = ["kind", "task", "model"]
        self.requests = Counter(
            "pale_requests",
            "Requests by kind (predict, look, infer), task, model and status; 499: the client disconnected",
            [*labels, "status"],
            registry=registry,
        )
        self.latency = Histogram(
            "pale_request_seconds",
            "Time from the start of a request to its response, for status 200",
            labels,
            buckets=SECONDS,
            registry=registry,
        )
        self.model = Histogram(
            "pale_model_seconds",
            "Time of the model for one batch",
            labels,
            buckets=SECONDS,
            registry=registry,
        )
        self.batches = Histogram(
            "pale_batch_pictures", "Images in a batch", labels, buckets=COUNTS, registry=registry
        )
        self.queue = Gauge(
            "pale_queue_pictures", "Images that wait for a model", labels, registry=registry
        )

    def watch(
        self, kind: str, task: str, model: str, depth: Callable[[], int]
    ) -> Callable[[int, float], None]:
        """Report the depth of a queue; return a function to call after each batch (its size, its seconds)."""
        labels = kind, task, model
        self.queue.labels(*labels).set_function(depth)
        batches, seconds_of = self.batches.labels(*labels), self.model.labels(*labels)

        def on_batch(count: int, seconds: float) -> None:
            batches.observe(count)
            seconds_of.observe(seconds)

        return on_batch

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)
