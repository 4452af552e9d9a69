"""Prometheus metrics with the project's name prefix, in a registry that the caller owns."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Upper bounds of the histogram buckets of durations, in seconds."""


STEP_SECONDS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, *SECONDS)
"""Bucket bounds of durations within an engine step, in seconds."""


class MetricFactory:
    """Creates ``headrace_…`` metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"headrace_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"headrace_{name}", text, labels, registry=self._registry)

    def seconds(
        self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS
    ) -> Histogram:
        """Return a histogram of durations. The suffix ``_seconds`` is added to its name."""
        return Histogram(
            f"headrace_{name}_seconds", text, labels, registry=self._registry, buckets=buckets
        )
