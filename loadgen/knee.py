"""Saturation and the knee of the latency curve over the rate, or over the concurrency.

A rate is saturated if requests in flight grow by more than a tenth of the arrival rate
(`measures.in_flight`), or if more than one request in twenty fails. Requests in flight of a closed
loop cannot grow, so only failures saturate a concurrency.

The knee is the highest unsaturated rate or concurrency at which enough requests met all objectives.
Without objectives it is the unsaturated one with the highest power, defined as throughput divided
by mean latency (Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in
computer communications", ICC 1979). Invalid points are not considered: they say nothing about the
server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.axis import RATE, Axis
from loadgen.number import percent, plain

GROWTH, FAILURES = 0.1, 0.05
"""Saturation thresholds.

``GROWTH`` is the maximum growth of requests in flight, divided by the arrival rate. ``FAILURES`` is
the maximum fraction of failed requests.
"""


@dataclass(frozen=True)
class Point:
    """One rate or concurrency of a sweep, with means over its runs.

    Attributes:
        load: offered rate in requests or chats per second, or concurrency.
        growth: growth of requests in flight, per second; 0 in a closed loop.
        latency: mean end-to-end latency in seconds; None if no request was answered.
        attainment: fraction of requests that met all objectives; None without objectives.
        valid: whether all runs are valid.
    """

    load: float
    throughput: float
    growth: float
    failures: float
    latency: float | None
    attainment: float | None
    valid: bool = True

    @property
    def saturated(self) -> bool:
        return self.saturation is not None

    @property
    def saturation(self) -> str | None:
        """Reason for which the point is saturated; None if it is not."""
        return saturation(self.load, self.growth, self.failures)


def saturation(load: float, growth: float, failures: float = 0.0) -> str | None:
    """Return why a server is saturated, or None if it is not.

    Args:
        load: offered rate in requests or chats per second, or concurrency.
        growth: growth of requests in flight, per second; 0 in a closed loop.
        failures: fraction of failed requests.
    """
    if failures > FAILURES:
        return f"{percent(failures)} % of requests failed"
    if growth > GROWTH * load:
        return f"requests in flight grew by {plain(growth)} per second"
    return None


@dataclass(frozen=True)
class Knee:
    """The knee of a sweep.

    Attributes:
        load: rate or concurrency; None if no point qualifies.
        why: definition of the knee, or why there is none.
        lower_bound: whether no higher load was measured, so that the knee may be higher.
    """

    load: float | None
    why: str
    lower_bound: bool = False

    def as_json(self, axis: Axis) -> dict[str, Any]:
        return {axis.name: self.load, "why": self.why, "lower_bound": self.lower_bound}


def knee(points: Sequence[Point], attainment: float, axis: Axis = RATE) -> Knee:
    """Return the knee of the valid points.

    Args:
        attainment: required fraction of requests that meet all objectives.
    """
    valid = [point for point in points if point.valid]
    sustained = [point for point in valid if not point.saturated]
    if not valid:
        return Knee(None, f"no {axis.name} has a valid measurement")
    if not sustained:
        return Knee(None, f"each valid {axis.name} is saturated: measure lower ones")
    share = f"at least {100 * attainment:g} % of requests within their objectives"
    if any(point.attainment is not None for point in valid):
        good = [point.load for point in sustained if (point.attainment or 0.0) >= attainment]
        if not good:
            return Knee(None, f"no {axis.name} has {share}: measure lower ones")
        return _knee(max(good), f"the highest {axis.name} with {share}", valid)
    powers = [
        (point.throughput / point.latency, point.load) for point in sustained if point.latency
    ]
    if not powers:
        return Knee(None, "no request was answered")
    return _knee(max(powers)[1], "the highest ratio of throughput to mean latency", valid)


def _knee(load: float, why: str, valid: Sequence[Point]) -> Knee:
    return Knee(load, why, lower_bound=all(point.load <= load for point in valid))


def knee_statement(sweep: Mapping[str, Any], axis: Axis) -> tuple[str, str]:
    """Return what a sweep document says about its knee: where it is, and why."""
    found = sweep["knee"]
    if not found:
        return "No knee", sweep.get("no_knee") or f"no {axis.name} qualifies"
    more = found.get("lower_bound")
    why = f"{found['why']}; no higher {axis.name} has a valid measurement" if more else found["why"]
    return f"Knee at {axis.of(found[axis.name])}{' or more' if more else ''}", why


def next_rate(points: Sequence[Point], refinements: int) -> float | None:
    """Return the next rate to measure, or None if the sweep is complete.

    The rate doubles until saturation, or until a point is invalid: the load generator, which was
    late there, would be later at higher rates. Each refinement then bisects the interval between
    the highest rate that was sustained and the lowest one that was not.

    Args:
        points: rates measured so far, in the order of measurement.
        refinements: number of bisections left.
    """
    limit = min((point.load for point in points if is_limit(point)), default=None)
    if limit is None:
        return 2 * max(point.load for point in points)
    sustained = max((point.load for point in points if point.load < limit), default=0.0)
    if not refinements:
        return None
    return float(f"{(sustained + limit) / 2:.3g}")


def is_limit(point: Point) -> bool:
    """Return whether higher rates are not worth measuring."""
    return point.saturated or not point.valid
