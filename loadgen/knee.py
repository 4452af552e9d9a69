"""Saturation and the knee of the latency curve over the rate, or over the concurrency.

A rate is saturated if requests in flight grow by more than a tenth of the arrival rate
(`measures.in_flight`), or if more than one request in twenty fails. Requests in flight of a closed
loop cannot grow, so only failures saturate a concurrency.

The knee is the highest unsaturated rate or concurrency at which enough requests met all objectives.
Without objectives it is the unsaturated one with the highest power, defined as throughput divided
by mean latency (Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in
computer communications", ICC 1979).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.axis import RATE, Axis

GROWTH, FAILURES = 0.1, 0.05
"""Saturation thresholds.

``GROWTH`` is the maximum growth of requests in flight, divided by the arrival rate. ``FAILURES`` is
the maximum fraction of failed requests.
"""


@dataclass(frozen=True)
class Point:
    """One rate or concurrency of a sweep, with means over its runs.

    Attributes:
        load: offered rate in requests per second, or concurrency.
        growth: growth of requests in flight, per second; 0 in a closed loop.
        latency: mean end-to-end latency in seconds; None if no request was answered.
        attainment: fraction of requests that met all objectives; None without objectives.
    """

    load: float
    throughput: float
    growth: float
    failures: float
    latency: float | None
    attainment: float | None

    @property
    def saturated(self) -> bool:
        return self.growth > GROWTH * self.load or self.failures > FAILURES


def knee(points: Sequence[Point], attainment: float, axis: Axis = RATE) -> dict[str, Any] | None:
    """Return the knee as ``rate`` or ``concurrency``, and ``why``; None if no point qualifies.

    Args:
        attainment: required fraction of requests that meet all objectives.
    """
    sustained = [point for point in points if not point.saturated]
    if any(point.attainment is not None for point in points):
        good = [point.load for point in sustained if (point.attainment or 0.0) >= attainment]
        why = (
            f"the highest {axis.name} with at least {attainment:.0%} of requests within their "
            "objectives"
        )
        return {axis.name: max(good), "why": why} if good else None
    powers = [
        (point.throughput / point.latency, point.load) for point in sustained if point.latency
    ]
    why = "the highest ratio of throughput to mean latency"
    return {axis.name: max(powers)[1], "why": why} if powers else None


def next_rate(points: Sequence[Point], refinements: int) -> float | None:
    """Return the next rate to measure, or None if the sweep is complete.

    The rate doubles until saturation. Each refinement then bisects the interval between the highest
    unsaturated and the lowest saturated rate.

    Args:
        points: rates measured so far, in the order of measurement.
        refinements: number of bisections left.
    """
    saturated = min((point.load for point in points if point.saturated), default=None)
    if saturated is None:
        return 2 * max(point.load for point in points)
    sustained = max((point.load for point in points if point.load < saturated), default=0.0)
    if not refinements:
        return None
    return float(f"{(sustained + saturated) / 2:.3g}")
