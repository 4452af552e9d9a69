"""Speed of workers, from the paces that they report.

The duration of a step grows with its number of tokens and with its context: the sum, over these
tokens, of the number of tokens that each attends to. Durations of steps cannot be compared
directly, because a busy worker has longer steps than an idle one. The ratio of two durations is
therefore divided by the ratio of the tokens, the ratio of the contexts or 1, whichever is largest.
If durations are linear functions of tokens and context with coefficients that are not negative, the
result for workers of equal speed is at most 1. `slowdown` is thus a lower bound. It is exact if
both steps have the same size.

A slow worker gets few requests or none, and therefore no new measurements. Its slowdown decays
towards 1, the value of a worker without measurements, so that it gets requests again.
"""

from collections.abc import Iterable

from services.common.placement import StepPace

HALF_LIFE_S = 180.0
"""Idle time in which the logarithm of a slowdown halves. A worker that was slower by a factor of 10
has no noticeable slowdown after 312 s. One of 300 requests is then slow if there is one per second,
since the worker is measured again."""
NOTICEABLE = 2.0
"""Slowdowns below this value do not affect placement. The durations of steps vary, for example with
the load of the other processes on a host."""


def slowdown(pace: StepPace | None, others: Iterable[StepPace]) -> float:
    """Return the factor by which a worker is slower than the fastest of the others, at least 1.

    Args:
        pace: recent steps of the worker; None if they are unknown.
        others: recent steps of comparable workers: with the same role and model.
    """
    if pace is None:
        return 1.0
    measured = max((_ratio(pace, other) for other in others), default=1.0)
    left: float = 0.5 ** (pace.idle_s / HALF_LIFE_S)
    decayed: float = max(1.0, measured) ** left
    return decayed


def noticeable(factor: float) -> float:
    """Return a slowdown as placement uses it: 1 if it is below `NOTICEABLE`."""
    return factor if factor >= NOTICEABLE else 1.0


def _ratio(pace: StepPace, other: StepPace) -> float:
    """Return the ratio of two step durations, corrected for sizes; see the module docstring."""
    larger = max(1.0, pace.tokens / other.tokens, pace.context / other.context)
    return pace.step_s / other.step_s / larger
