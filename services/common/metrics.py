"""Prometheus metrics with the project's name prefix, in a registry that the caller owns.

A name belongs to one service, so that sums over all scraped processes count nothing twice: prefill
and decode workers share their names, and no other service exports them.
"""

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from services.common.disk import DiskCollector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Upper bounds of the histogram buckets of durations, in seconds."""


STEP_SECONDS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, *SECONDS)
"""Bucket bounds of durations within an engine step, in seconds."""


class MetricFactory:
    """Creates ``headrace_…`` metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str, values: Iterable[str] = ()) -> Counter:
        """Return a counter. The suffix ``_total`` is added to its name.

        Args:
            values: for a counter with one label, values of the label whose series begin at 0, so
                that a rate includes their first event.
        """
        made = Counter(f"headrace_{name}", text, labels, registry=self._registry)
        for value in values:
            made.labels(value)
        return made

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"headrace_{name}", text, labels, registry=self._registry)

    def seconds(
        self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS
    ) -> Histogram:
        """Return a histogram of durations. The suffix ``_seconds`` is added to its name."""
        return Histogram(
            f"headrace_{name}_seconds", text, labels, registry=self._registry, buckets=buckets
        )


def service_registry(*, caches: bool = False) -> CollectorRegistry:
    """Return a registry with the version of Headrace and the metrics of this process.

    Args:
        caches: whether the process writes to the cache folder.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(DiskCollector(caches=caches))
    info = MetricFactory(registry).gauge(
        "build_info", "Always 1; the label is the version of Headrace.", "version"
    )
    info.labels(service_version()).set(1)
    return registry


@cache
def service_version() -> str:
    """Return the version of Headrace."""
    try:
        return version("headrace")
    except PackageNotFoundError:  # run from a source tree without installation
        return "unknown"
