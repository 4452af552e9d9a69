"""Pace of a worker: duration and size of its recent steps."""

from collections import deque
from dataclasses import dataclass, replace
from statistics import fmean

from services.common.messages import MAX_STEP_S
from services.common.placement import StepPace

RECENT_STEPS = 32
RECENT_S = 60.0
UNCOUNTED_STEPS = 2
"""Steps after the start that are not counted, because they may compile kernels."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of an engine.

    Attributes:
        seconds: duration.
        tokens: number of tokens that it computed.
        context: sum over these tokens of the number of tokens that each attended to.
        decoded: number of running sequences that it decoded.
    """

    seconds: float
    tokens: int
    context: int
    decoded: int


class PaceMeter:
    """Means over at most `RECENT_STEPS` steps, the last one and those in the `RECENT_S` before it.

    There is no clock: times are in seconds of a monotonic clock. One thread may add steps while
    another one reads the means.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, MeasuredStep]] = deque(maxlen=RECENT_STEPS)
        self._uncounted = UNCOUNTED_STEPS

    def add(self, step: MeasuredStep, now: float) -> None:
        """Record a step that ends now."""
        if self._uncounted:
            self._uncounted -= 1
            return
        while self._steps and self._steps[0][0] < now - RECENT_S:
            self._steps.popleft()
        self._steps.append((now, step))

    def extend(self, seconds: float) -> None:
        """Add time to the last recorded step, which has continued since it was recorded."""
        if self._steps:
            ended, step = self._steps.pop()
            self._steps.append((ended + seconds, replace(step, seconds=step.seconds + seconds)))

    def pace(self, *, idle_s: float = 0.0, current: MeasuredStep | None = None) -> StepPace | None:
        """Return the means, or None if no step was recorded.

        Args:
            idle_s: time since the last step.
            current: the step that is in progress, with its duration so far. If it has already taken
                longer than the mean, it counts as a step, so that a step that hangs is noticed.
        """
        steps = self._recent()
        if not steps:
            return None
        if current and current.tokens and current.seconds > fmean(s.seconds for s in steps):
            steps.append(current)
        tokens = fmean(step.tokens for step in steps)
        return StepPace(
            step_s=min(max(fmean(step.seconds for step in steps), 1e-9), MAX_STEP_S),
            tokens=tokens,
            context=max(fmean(step.context for step in steps), tokens),
            idle_s=idle_s,
        )

    @property
    def inter_token_s(self) -> float:
        """Mean duration of the steps that decoded running sequences; 0 if there were none."""
        return fmean([s.seconds for s in self._recent() if s.decoded] or [0.0])

    def _recent(self) -> list[MeasuredStep]:
        steps = list(self._steps)  # a copy: the thread that adds steps may change the queue
        return [step for _, step in steps]
