"""Metrics that every worker has, of models that generate text and of encoders."""

from collections import deque

from prometheus_client import Histogram

from services.common.metrics import MetricFactory, service_registry
from services.common.secret_metrics import SecretMetrics


class ProcessMetrics:
    """The metrics of one worker process; subclasses add those of their work.

    Attributes:
        registry: everything that the worker's ``/metrics`` endpoint serves.
        make: makes further metrics of the registry.
        ready: 1 while the worker takes requests, NaN while draining, else 0.
    """

    def __init__(self) -> None:
        self.registry = service_registry(caches=True)
        self.secrets = SecretMetrics(self.registry)
        self.make = MetricFactory(self.registry)
        self.ready = self.make.gauge(
            "worker_ready", "1 while the worker takes requests, NaN while draining, else 0."
        )
        self.queue_tokens = self.make.gauge("queue_tokens", "Tokens accepted and not yet finished.")


def drain(durations: "deque[float]", histogram: Histogram) -> None:
    """Move durations that a thread has appended to a histogram; in seconds."""
    while durations:
        histogram.observe(durations.popleft())
