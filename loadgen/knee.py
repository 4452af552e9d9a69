"""Where a target's curve bends: what it can keep up with, and what it is best asked for.

Saturated is a rate at which requests under way grow by more than a tenth of those that come
(`measures.in_flight`), or of which more than one in twenty fails. The knee is, with objectives, the
highest rate of which a share attains them; without, the one with the most power: requests answered
a second, over their mean latency (Kleinrock, "Power and deterministic rules of thumb for
probabilistic problems in computer communications", ICC 1979).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GROWTH, FAILURES = 0.1, 0.05
"""Of the requests that come: what a target that keeps up stays below."""


@dataclass(frozen=True)
class Point:
    """One rate of a sweep, means over its runs.

    Attributes:
        growth: of requests under way, a second.
        latency: mean end-to-end, in seconds; None: no request was answered.
        attainment: None: there are no objectives.
    """

    rate: float
    throughput: float
    growth: float
    failures: float
    latency: float | None
    attainment: float | None

    @property
    def saturated(self) -> bool:
        return self.growth > GROWTH * self.rate or self.failures > FAILURES


def knee(points: Sequence[Point], attainment: float) -> dict[str, Any] | None:
    """The ``rate`` and ``why``; None: no rate is below saturation, or attains enough.

    Args:
        attainment: the least share of requests within all objectives.
    """
    kept_up = [point for point in points if not point.saturated]
    if any(point.attainment is not None for point in points):
        good = [point.rate for point in kept_up if (point.attainment or 0.0) >= attainment]
        why = f"the highest rate of which {attainment:.0%} are within their objectives"
        return {"rate": max(good), "why": why} if good else None
    powers = [(point.throughput / point.latency, point.rate) for point in kept_up if point.latency]
    why = "the most requests a second for a second of latency"
    return {"rate": max(powers)[1], "why": why} if powers else None


def next_rate(points: Sequence[Point], refinements: int) -> float | None:
    """Twice as many, until the target is saturated; then so many times halfway between the highest
    rate that it keeps up with and the lowest that it does not. None: the sweep is over.

    Args:
        points: in the order in which they were measured.
        refinements: what is left of them.
    """
    over = min((point.rate for point in points if point.saturated), default=None)
    if over is None:
        return 2 * max(point.rate for point in points)
    kept_up = max((point.rate for point in points if point.rate < over), default=0.0)
    if not refinements:
        return None
    return float(f"{(kept_up + over) / 2:.3g}")
