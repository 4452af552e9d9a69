"""What a run is sent to."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from loadgen.clock import Clock
from loadgen.plan import Planned
from loadgen.record import Failure, Record


class Target(Protocol):
    """Sends requests, as many at a time as are asked for."""

    name: str
    """Where it is, for reports; without credentials."""

    async def send(self, planned: Planned, record: Record, clock: Clock) -> None:
        """Sends one request, and writes into ``record`` what becomes of it.

        Raises nothing that a target can cause: that is what the record's failure is for.
        """
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Options:
    """What all requests of a run have in common.

    Attributes:
        model: its name, as the target serves it.
        timeout_s: from the send to the last token.
        temperature: 0 is greedy.
        ignore_eos: answers go on to their ``max_tokens``; not every server has that.
        keep_answers: text and token ids go into the records.
        extra: fields that bodies get beside OpenAI's, such as ``{"top_k": 5}``.
    """

    model: str
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = False
    keep_answers: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


class Failed(Exception):
    """How a request failed, from where it was seen to where it is recorded."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


class Left(Exception):
    """The client has what it wanted of the answer."""


def add_piece(record: Record, planned: Planned, at: float, tokens: int) -> None:
    """A piece of the answer with so many tokens came.

    Raises:
        Left: it is the one after which this client leaves.
    """
    record.times.append(at)
    record.counts.append(tokens)
    if planned.leaves_after is not None and sum(record.counts) >= planned.leaves_after:
        raise Left


def settle(record: Record, clock: Clock, error: Exception | None) -> None:
    """Writes down how a request ended; None: as it should."""
    record.ended = clock()
    if isinstance(error, Left):
        record.cancelled = True
    elif isinstance(error, Failed):
        record.failure, record.detail = error.failure, str(error)
    elif isinstance(error, TimeoutError):
        record.failure, record.detail = Failure.TIMEOUT, "no end within the time limit"
    elif error is not None:
        raise error
