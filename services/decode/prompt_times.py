"""Measured times of prompts on both paths, and the prediction of the faster path.

A decode worker that has cached all but the last tokens of a prompt can compute these tokens itself,
or fetch their KV from the prefill worker of the request. `is_faster_here` compares the predicted
times until the sequence can be decoded:

- **here**: the step in progress, then the tokens themselves, after those of other prompts that this
  worker is to compute;
- **fetched**: a fixed time for messages, the queue of the prefill worker, the tokens that it lacks,
  and the transfer.

Predictions are made from times of recent prompts (`PromptTimes`). Routers balance the queues of
prefill workers, so the times of all prefill workers are combined. There is no clock: methods take
``now``, in seconds of a monotonic clock.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Self, TypeVar

T = TypeVar("T")

RECENT_PROMPTS = 32
"""Number of prompts of each path from which times are predicted."""
RECENT_S = 60.0
"""Time after which a prompt no longer counts, seconds. Otherwise, a path that was slow once might
never be chosen, and so never be measured, again."""
QUEUE_MEMORY_S = 5.0
"""Time in which the last measured queueing time of prefill workers falls to 1/e, seconds."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as a linear function of a number of tokens."""

    fixed_s: float
    token_s: float

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Self:
        """Return the least-squares line whose intercept and slope are not negative.

        If the numbers of tokens hardly differ, the seconds are taken to be proportional to them.

        Args:
            points: numbers of tokens and seconds, at least one.
        """
        tokens, seconds = zip(*points, strict=True)
        mean, mean_s = fmean(tokens), fmean(seconds)
        variance = fmean((each - mean) ** 2 for each in tokens)
        squares = variance + mean**2
        proportional = fmean(n * s for n, s in points) / squares if squares else 0.0
        if variance <= (mean / 4) ** 2:
            return cls(0.0, proportional) if squares else cls(mean_s, 0.0)
        token_s = fmean((n - mean) * (s - mean_s) for n, s in points) / variance
        fixed_s = mean_s - token_s * mean
        if token_s < 0:
            return cls(mean_s, 0.0)
        return cls(0.0, proportional) if fixed_s < 0 else cls(fixed_s, token_s)

    def at(self, tokens: float) -> float:
        """Return the seconds for a number of tokens."""
        return self.fixed_s + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class FetchedPrompt:
    """Measured times of a prompt whose KV was fetched, in seconds.

    Attributes:
        tokens: number of its tokens.
        reused: number of these that the prefill worker had cached.
        sent: number of tokens whose KV was sent.
        queue_s: time in the queue of the prefill worker.
        prefill_s: time from the prompt's first chunk to its first tokens.
        first_s: time from the request of this worker to the arrival of the first tokens.
        rest_s: time from then on until all KV was verified.
    """

    tokens: int
    reused: int
    sent: int
    queue_s: float
    prefill_s: float
    first_s: float
    rest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Predictions from recent prompts.

    Attributes:
        compute: time in which this worker computes prompt tokens; None if it has computed none
            recently.
        prefill: time in which a prefill worker computes prompt tokens.
        transfer: time from the first tokens to the last KV, by the tokens whose KV is sent.
        fixed_s: time of a fetch for messages and handovers between processes, seconds.
        queue_s: time in the queue of a prefill worker, seconds.
        reused: fraction of the tokens of prompts that prefill workers had cached.
    """

    compute: Line | None
    prefill: Line
    transfer: Line
    fixed_s: float
    queue_s: float
    reused: float


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Numbers of tokens of a prompt to compute or to fetch.

    Attributes:
        tokens: number of its tokens.
        left: number of these whose KV this worker does not have.
        waiting_here: prompt tokens that this worker has to compute before those of the prompt.
        waiting_there: tokens of other prompts whose KV this worker fetches from the same prefill
            worker, and whose first tokens have not arrived.
    """

    tokens: int
    left: int
    waiting_here: int = 0
    waiting_there: int = 0


def compute_s(prompt: PromptSize, measured: Measured, step_s: float) -> float:
    """Return the predicted time until this worker has computed the rest of a prompt, in seconds.

    Without recent measurements, the speed of prefill workers is assumed.

    Args:
        step_s: time of a step with running sequences, of which one may be in progress.
    """
    return step_s + (measured.compute or measured.prefill).at(prompt.left + prompt.waiting_here)


def fetch_s(prompt: PromptSize, measured: Measured) -> float:
    """Return the predicted time until the KV of the rest of a prompt has arrived, in seconds."""
    lacking = max(prompt.left, (1 - measured.reused) * prompt.tokens)
    queue_s = measured.queue_s
    if prompt.waiting_there:
        queue_s = max(queue_s, measured.prefill.at(prompt.waiting_there))
    computed_s = queue_s + measured.prefill.at(lacking)
    return measured.fixed_s + computed_s + measured.transfer.at(prompt.left)


def is_faster_here(prompt: PromptSize, measured: Measured, step_s: float) -> bool:
    """Return whether this worker is predicted to compute the rest of a prompt faster.

    Args:
        step_s: see `compute_s`.
    """
    return compute_s(prompt, measured, step_s) <= fetch_s(prompt, measured)


class PromptTimes:
    """Times of the last `RECENT_PROMPTS` prompts of the last `RECENT_S` on both paths."""

    def __init__(self) -> None:
        # Each with the time at which it was recorded.
        self._computed: deque[tuple[float, tuple[float, float]]] = deque(maxlen=RECENT_PROMPTS)
        self._fetched: deque[tuple[float, FetchedPrompt]] = deque(maxlen=RECENT_PROMPTS)

    def add_computed(self, tokens: int, seconds: float, now: float) -> None:
        """Record that this worker has computed tokens of a prompt in these seconds."""
        self._computed.append((now, (tokens, seconds)))

    def add_fetched(self, prompt: FetchedPrompt, now: float) -> None:
        """Record that the KV of a prompt has arrived."""
        self._fetched.append((now, prompt))

    def measured(self, now: float) -> Measured | None:
        """Return what predictions are made from; None if no prompt was fetched recently."""
        computed, fetched = _recent(self._computed, now), _recent(self._fetched, now)
        if not fetched:
            return None
        age_s = now - self._fetched[-1][0]
        return Measured(
            compute=Line.through(computed) if computed else None,
            prefill=Line.through([(each.tokens - each.reused, each.prefill_s) for each in fetched]),
            transfer=Line.through([(each.sent, each.rest_s) for each in fetched]),
            fixed_s=median(
                max(each.first_s - each.queue_s - each.prefill_s, 0.0) for each in fetched
            ),
            queue_s=fetched[-1].queue_s * math.exp(-age_s / QUEUE_MEMORY_S),
            reused=sum(each.reused for each in fetched) / sum(each.tokens for each in fetched),
        )


def _recent(recorded: deque[tuple[float, T]], now: float) -> list[T]:
    """Remove what is older than `RECENT_S`, and return the rest."""
    while recorded and recorded[0][0] < now - RECENT_S:
        recorded.popleft()
    return [each for _, each in recorded]
