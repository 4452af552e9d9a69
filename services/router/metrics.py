"""Prometheus metrics of the router."""

from collections import Counter as Tally
from collections.abc import Mapping
from itertools import product

from prometheus_client import generate_latest

from services.common.encoder_placement import ENCODER, EncoderList
from services.common.listings import WorkerView
from services.common.metrics import MetricFactory, service_registry
from services.common.placement import Role
from services.common.router_errors import ErrorCode
from services.common.secret_metrics import SecretMetrics
from services.router.capacity import WorkerHealth

PLACE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1, 2.5, 10, 30, 120)
OUTCOMES = ("placed", "abandoned", ErrorCode.QUEUE_FULL, ErrorCode.QUEUE_TIMEOUT)
"""Outcomes whose series begin at 0; others begin when they first occur."""


class RouterMetrics:
    """Metrics of one router, in its own registry. Settings limit the number of label values."""

    def __init__(self) -> None:
        self.registry = service_registry()
        self.secrets = SecretMetrics(self.registry)
        make = MetricFactory(self.registry)
        self.requests = make.counter(
            "router_requests", "HTTP requests that this router answered.", "endpoint", "status"
        )
        self.place_seconds = make.seconds(
            "router_place",
            "Seconds from a placement request to its answer, with its time in the queue.",
            buckets=PLACE_BUCKETS_S,
        )
        self.placements = make.counter(
            "router_placements", "Placement requests by outcome.", "outcome", values=OUTCOMES
        )
        self.encode_place_seconds = make.seconds(
            "router_encode_place",
            "Seconds from a placement request for an encoder to its answer, with its time in the "
            "queue.",
            buckets=PLACE_BUCKETS_S,
        )
        self.encode_placements = make.counter(
            "router_encode_placements",
            "Placement requests for encoders by outcome.",
            "outcome",
            values=OUTCOMES,
        )
        self._reuses = make.counter(
            "router_placements_with_reuse",
            "Placements on a worker that is expected to have tokens of the prompt in its cache.",
            "role",
            values=tuple(Role),
        )
        self._expected_tokens = make.counter(
            "router_expected_cached_tokens",
            "Prompt tokens that the workers of placements are expected to have in their caches.",
            "role",
            values=tuple(Role),
        )
        self._workers = make.gauge(
            "router_workers", "Workers registered with this router.", "role", "state"
        )
        self._queue_tokens = make.gauge(
            "router_queue_tokens",
            "Tokens queued on a worker, in its last heartbeat and in placements since then.",
            *("worker", "role"),
        )
        self._slowdown = make.gauge(
            "router_worker_slowdown",
            "Factor by which a worker is slower than the fastest one with its role and model.",
            *("worker", "role"),
        )
        self._waiting = make.gauge(
            "router_requests_waiting", "Placement requests in this router's queue."
        )
        self._encodes_waiting = make.gauge(
            "router_encode_requests_waiting",
            "Placement requests for encoders in this router's queue.",
        )

    def count(self, endpoint: str, status: int) -> None:
        """Count the answer to a request."""
        self.requests.labels(endpoint, str(status)).inc()

    def count_expected(self, expected: Mapping[Role, int]) -> None:
        """Count a placement, given `PendingPlacement.expected`."""
        for role, tokens in expected.items():
            if tokens:
                self._reuses.labels(role).inc()
                self._expected_tokens.labels(role).inc(tokens)

    def render(self, workers: list[WorkerView], waiting: int, encoders: EncoderList) -> bytes:
        """Update the gauges and return all metrics as text, without series of removed workers."""
        self._waiting.set(waiting)
        self._encodes_waiting.set(encoders.waiting)
        self._queue_tokens.clear()
        self._slowdown.clear()
        numbers = Tally((worker.role, worker.state) for worker in workers)
        for role, state in product(Role, WorkerHealth):
            self._workers.labels(role, state).set(numbers[role, state])
        for worker in workers:
            tokens = worker.queue_tokens + worker.promised_tokens
            self._queue_tokens.labels(worker.worker_id, worker.role).set(tokens)
            self._slowdown.labels(worker.worker_id, worker.role).set(worker.slowdown)
        states = Tally(worker.state for worker in encoders.workers)
        for state in WorkerHealth:
            self._workers.labels(ENCODER, state).set(states[state])
        for encoder in encoders.workers:
            self._queue_tokens.labels(encoder.worker_id, ENCODER).set(encoder.queue_tokens)
        return generate_latest(self.registry)
