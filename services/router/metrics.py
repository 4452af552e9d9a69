"""Prometheus metrics of the router."""

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.common.placement import WorkerView

PLACE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1, 2.5, 10, 30, 120)


class RouterMetrics:
    """Metrics of one router, in its own registry. Settings limit the number of label values."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "headrace_requests",
            "HTTP requests answered",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.place_seconds = Histogram(
            "headrace_place_seconds",
            "Seconds from the arrival of a place call to its answer, including time in the queue",
            buckets=PLACE_BUCKETS_S,
            registry=self.registry,
        )
        self.placements = Counter(
            "headrace_placements",
            "Place calls, by outcome",
            ["outcome"],
            registry=self.registry,
        )
        self._workers = Gauge(
            "headrace_workers", "Registered workers", ["role", "state"], registry=self.registry
        )
        self._queue_tokens = Gauge(
            "headrace_queue_tokens",
            "Tokens queued on a worker, reported and promised",
            ["worker", "role"],
            registry=self.registry,
        )
        self._waiting = Gauge(
            "headrace_num_requests_waiting", "Place calls in the queue", registry=self.registry
        )

    def render(self, workers: list[WorkerView], waiting: int) -> bytes:
        """Update the gauges and return all metrics as text, without series of removed workers."""
        self._waiting.set(waiting)
        self._workers.clear()
        self._queue_tokens.clear()
        for (role, state), number in Tally((w.role.value, w.state) for w in workers).items():
            self._workers.labels(role, state).set(number)
        for worker in workers:
            tokens = worker.queue_tokens + worker.promised_tokens
            self._queue_tokens.labels(worker.worker_id, worker.role.value).set(tokens)
        return generate_latest(self.registry)
