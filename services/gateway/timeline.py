"""Timelines of requests: what the gateway observes of each, never a prompt or an output.

The stages of a request follow one another on the gateway's clock:

=============  ===================================================================================
``receive``    from the arrival to the first call of a router: body, validation, tokens
``route``      placement, with the time in the router's queue
``queue``      in the prefill worker, before the first chunk of the prompt
``prefill``    up to the first token
``transfer``   from the first token to the arrival of the KV
``decode``     up to the last token
``failed``     an attempt that failed on a worker, from its placement
=============  ===================================================================================

A worker reports its stage times with the last token. Until then, ``prefill`` includes ``queue``,
and ``transfer`` ends with the second token.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.v1 import decode_pb2
from services.common.errors import DeadlineExceeded, InternalFault, ServiceError
from services.common.placement import Placement
from services.common.tracing import Span
from services.gateway.metrics import GatewayMetrics
from services.gateway.requests import GenerationRequest

_MAX_ATTEMPTS = 8
"""Maximum number of attempts of a request that are kept: the last ones."""
_TIMER_S = 1e-3
"""Resolution of uvloop's timers in seconds. A request may end this long before its deadline."""

RUNNING, OK, CANCELLED = "running", "ok", "cancelled"

Stage = tuple[str, float, float]
"""Name, start after the arrival and duration, both in seconds."""


@dataclass(slots=True)
class Attempt:
    """One placement of a request. Times are in monotonic time, seconds; infinite until then.

    Attributes:
        began: start of the placement request.
        prefill: id of the prefill worker; None if the decode worker computes the prompt.
        second: time of the second batch of tokens. By then the decode worker has the KV.
        last: time of the last batch of tokens.
        failure: reason for which the attempt failed.
    """

    began: float
    placed: float = math.inf
    prefill: str | None = None
    decode: str | None = None
    first: float = math.inf
    second: float = math.inf
    last: float = math.inf
    ended: float = math.inf
    failure: str | None = None


class RequestTimeline:
    """Timeline of one request. Records its latency as metrics and in its span as well.

    Attributes:
        status: `RUNNING`, `OK`, `CANCELLED` or the code of a `ServiceError`.
        number: number of the request, counted in order of arrival at this gateway.
        attempts: the last attempts.
        ended: time of the end, in monotonic time, seconds; infinite while the request runs.
        output_tokens: number of output tokens of all choices, as in ``usage``.
        cached_tokens: number of prompt tokens that no worker computed, as in ``usage``.
        times: stage times that the last worker reported, seconds.
    """

    def __init__(
        self, request: GenerationRequest, number: int, metrics: GatewayMetrics, span: Span
    ) -> None:
        context = request.context
        self.number = number
        self._id = context.request_id
        self._arrived = context.arrived
        self._deadline = context.deadline
        self._prompt_tokens = request.prompt_tokens
        self._choices = request.options.n
        self._metrics = metrics
        self._span = span
        self._first: float | None = None
        # The time of the last token of each choice.
        self._last: dict[int, float] = {}
        self._number_of_attempts = 0
        self.status = RUNNING
        self.ended = math.inf
        self.attempts: deque[Attempt] = deque(maxlen=_MAX_ATTEMPTS)
        self.output_tokens = self.cached_tokens = 0
        self.times: dict[str, float] = {}

    @property
    def was_placed(self) -> bool:
        """Whether workers were chosen for an attempt."""
        return any(attempt.placed < math.inf for attempt in self.attempts)

    def route(self) -> None:
        """Begin an attempt with its placement request."""
        self._number_of_attempts += 1
        self.attempts.append(Attempt(_now()))

    def placed(self, placement: Placement) -> None:
        """Record the workers of the attempt."""
        attempt = self.attempts[-1]
        attempt.placed = _now()
        attempt.decode = placement.decode.worker_id
        attempt.prefill = placement.prefill.worker_id if placement.prefill else None

    def record_tokens(self, counts: Mapping[int, int]) -> None:
        """Record tokens of the output that arrived together.

        Each choice is a stream of its own. Tokens of a choice that arrive together share the time
        since its last token equally.

        Args:
            counts: number of tokens, at least 1, of each choice that has any.
        """
        if not counts:
            return
        now = _now()
        attempt = self.attempts[-1]
        if not self._last:
            self._first = now
            self._metrics.first_token.observe(now - self._arrived)
            self._span.set({"gen_ai.response.time_to_first_chunk": now - self._arrived})
        for choice, count in counts.items():
            if (last := self._last.get(choice)) is not None:
                for _ in range(count):
                    self._metrics.inter_token.observe((now - last) / count)
            self._last[choice] = now
        attempt.last = now
        if attempt.first == math.inf:
            attempt.first = now
        elif attempt.second == math.inf:
            attempt.second = now
        total = sum(counts.values())
        self.output_tokens += total
        self._metrics.generation_tokens.inc(total)

    def record_stages(self, times: decode_pb2.StageTimes) -> None:
        """Record the stage times of a worker. The time of a stage that was skipped is 0.

        Implausible times are ignored: one that is not a number would remain in the sum of the
        metric for ever.
        """
        found = ((field.name, seconds) for field, seconds in times.ListFields())
        self.times = {name: seconds for name, seconds in found if 0 < seconds < math.inf}
        for name, seconds in self.times.items():
            self._metrics.stages.labels(name).observe(seconds)

    def fail(self, reason: str) -> None:
        """End the attempt with the failure of a worker."""
        attempt = self.attempts[-1]
        attempt.ended = _now()
        attempt.failure = reason

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End the request with the ``with`` block; an exception decides its status."""
        # Exceptions that are not handled below leave this status.
        status = InternalFault.code
        try:
            yield
            status = OK
        except ServiceError as error:
            status = error.code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            expired = _now() >= self._deadline - _TIMER_S
            status = DeadlineExceeded.code if expired else CANCELLED
            raise
        finally:
            self.status = status
            self.ended = _now()
            if self._span.recording:
                self._span.set({"gen_ai.usage.output_tokens": self.output_tokens})
                if self._first is not None:
                    end = time.perf_counter()  # the clock of spans
                    self._span.record("stream", end - (self.ended - self._first), end)

    def finish(self, reasons: Sequence[str]) -> None:
        """Record that all choices are complete, with the finish reason of each."""
        self._metrics.end_to_end.observe(_now() - self._arrived)
        self._metrics.cached_tokens.inc(self.cached_tokens)
        self._span.set({"gen_ai.response.finish_reasons": reasons})

    def describe(self, now: float) -> dict[str, Any]:
        """Return the timeline at monotonic time ``now`` for JSON; times in seconds."""
        last = self.attempts[-1] if self.attempts else Attempt(now)
        first = self._first
        return {
            "number": self.number,
            "id": self._id,
            "trace": self._span.ids.get("trace_id"),
            "age_s": _rounded(now - self._arrived),
            "status": self.status,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "choices": self._choices,
            "prefill": last.prefill,
            "decode": last.decode,
            "attempts": self._number_of_attempts,
            "failures": [a.failure for a in self.attempts if a.failure],
            "first_token_s": None if first is None else _rounded(first - self._arrived),
            "total_s": _rounded(min(now, self.ended) - self._arrived),
            "stages": self.stages(now),
            "read_s": _rounded(self.times.get("transfer", 0.0)),
            "verify_s": _rounded(self.times.get("verify", 0.0)),
        }

    def stages(self, now: float) -> list[Stage]:
        """Return the stages up to monotonic time ``now``, in order and without overlaps."""
        end = min(now, self.ended)
        spans: list[tuple[str, float, float]] = []
        if self.attempts:
            spans.append(("receive", self._arrived, self.attempts[0].began))
        for attempt in self.attempts:
            spans += _spans(attempt, self.times if attempt is self.attempts[-1] else {}, end)
        return [
            (name, _rounded(start - self._arrived), _rounded(stop - start))
            for name, start, stop in spans
            if stop > start
        ]


def _spans(attempt: Attempt, times: dict[str, float], end: float) -> list[tuple[str, float, float]]:
    """Return name, start and end of each stage of an attempt, in monotonic time.

    Stages that the attempt has not reached, or that it lacks, have no duration.

    Args:
        times: stage times that the worker reported, seconds; empty if it has not.
        end: end of the request, or the present if it is running.
    """
    placed = min(attempt.placed, end)
    first = min(attempt.first, end)
    route = ("route", attempt.began, placed)
    if attempt.failure is not None:
        return [route, ("failed", placed, min(attempt.ended, end))]
    computing = max(placed, first - times["prefill"]) if "prefill" in times else placed
    queued = max(placed, computing - times.get("queue", 0.0))
    if attempt.prefill is None:
        arrived = first
    elif "decode" in times:
        arrived = min(max(first, attempt.last - times["decode"]), end)
    else:
        arrived = min(attempt.second, end)
    return [
        route,
        ("queue", queued, computing),
        ("prefill", computing, first),
        ("transfer", first, arrived),
        ("decode", arrived, end),
    ]


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _now() -> float:
    return time.monotonic()
