"""Validity of a run: if the load generator sends late, it measures its own delay as well."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.axis import Axis
from loadgen.number import counted
from loadgen.statistics import Distribution

MAX_LAG_S = 0.01
"""Default p99 dispatch lag above which a run is invalid."""
_LAG_PERCENTILE = 99.0
_BUSY = 0.8
"""Fraction of a core above which the load generator itself, which uses one core, is the limit."""


@dataclass(frozen=True)
class Invalid:
    """Reason for which a run is invalid, and a remedy for the next run."""

    reason: str
    remedy: str


_ACCEPT = "--most-lag accepts more lag, which latencies include."
_DELAYED = (
    "Other programs, such as the server itself, delayed the load generator: run it on another "
    f"machine or on cores of its own (taskset), or lower the rate. {_ACCEPT}"
)
_TOO_MUCH = (
    "The load generator used a whole core, and cannot use more: lower the rate, or divide it among "
    f"several load generators. {_ACCEPT}"
)
_NOT_IN_TIME = (
    "Requests were not prepared in time: give --requests, so that all are prepared before the run, "
    f"or --tokenizer, or run the load generator on cores of its own. {_ACCEPT}"
)
NOTHING_SENT = Invalid(
    "no request was sent in the measured part of the run",
    "Raise --duration or the rate, or shorten --warm-up and --cool-down.",
)


def invalid(
    lag: Distribution | None, max_lag_s: float, *, cores: float | None, closed: bool
) -> Invalid | None:
    """Return why a run is invalid, or None if it is valid.

    Args:
        lag: dispatch lags in seconds; None if nothing was sent.
        cores: CPU time of the load generator, divided by the duration of the run; None if unknown.
        closed: whether the run is a closed loop.
    """
    if lag is None:
        return NOTHING_SENT
    late_s = lag.percentile(_LAG_PERCENTILE)
    if late_s <= max_lag_s:
        return None
    reason = (
        f"the load generator was late: p99 dispatch lag is {1e3 * late_s:,.1f} ms, the limit is "
        f"{1e3 * max_lag_s:g} ms"
    )
    if closed:
        return Invalid(reason, _NOT_IN_TIME)
    return Invalid(reason, _TOO_MUCH if cores is not None and cores > _BUSY else _DELAYED)


def not_prepared(error: str) -> Invalid:
    """Return the reason for which a closed loop that ran out of prepared requests is invalid."""
    return Invalid(
        f"no more requests were prepared: {error}",
        "Give --requests, so that all are prepared before the run, or the model's tokenizer.json "
        "with --tokenizer.",
    )


def invalid_points(points: Sequence[Mapping[str, Any]], axis: Axis) -> list[str]:
    """Return which points of a sweep are invalid and why, then what to do about it."""
    found = [point for point in points if point["invalid"]]
    reasons = [
        f"At {axis.of(point[axis.name])}, in {point.get('invalid_runs', 1)} of "
        f"{counted(len(point['seeds']), 'run')}: {point['invalid']}."
        for point in found
    ]
    remedies = dict.fromkeys(point["remedy"] for point in found if point.get("remedy"))
    return [*reasons, *remedies]
