"""Record of one request, the only input of all measures."""

from dataclasses import dataclass, field
from enum import StrEnum


class Failure(StrEnum):
    """Failure of a request as seen by the client. Each failed request has exactly one."""

    REFUSED = "refused"
    """The connection could not be established."""
    RESET = "reset"
    """The connection was closed or reset before the answer began."""
    INTERRUPTED = "interrupted"
    """The answer ended midway: a reset, or an end without the final event."""
    TIMEOUT = "timeout"
    """The answer did not end within the request's time limit."""
    REJECTED = "rejected"
    """The server is overloaded: status 429 or 503, RESOURCE_EXHAUSTED or UNAVAILABLE."""
    CLIENT_ERROR = "client_error"
    """Any other 4xx status: the request was invalid."""
    SERVER_ERROR = "server_error"
    """Any other status except 200, or an error event in the answer."""
    MALFORMED = "malformed"
    """An invalid answer: not HTTP, not an event stream, not JSON, or without a token."""
    NO_TEXT = "no_text"
    """An answer with tokens, but without text in a field that the load generator knows."""
    NOT_SENT = "not_sent"
    """A later turn of a chat, which was never sent because an earlier turn failed."""

    @property
    def words(self) -> str:
        """Verb phrase for reports, such as "timed out"."""
        return _WORDS[self]


_WORDS = {
    Failure.REFUSED: "could not connect",
    Failure.RESET: "cut off before an answer",
    Failure.INTERRUPTED: "cut off midway",
    Failure.TIMEOUT: "timed out",
    Failure.REJECTED: "rejected (overloaded)",
    Failure.CLIENT_ERROR: "rejected (invalid request)",
    Failure.SERVER_ERROR: "ended with a server error",
    Failure.MALFORMED: "got a malformed answer",
    Failure.NO_TEXT: "got no readable text",
    Failure.NOT_SENT: "not sent after a failed turn",
}


@dataclass(slots=True)
class Record:
    """One request. Times are monotonic seconds after the start of the run.

    Attributes:
        number: index of the request in the schedule.
        due: scheduled send time, drawn before the run; in a closed loop the time when its slot
            became free. A later turn of a chat is due when the turn before it has ended and the
            user has read the answer.
        input_tokens: number of prompt tokens as counted by the target's tokenizer; replaced by the
            number in the target's answer if it reports one.
        wanted_tokens: output tokens requested as ``max_tokens``.
        sent: time when sending began, connection set-up included; None if never sent.
        times: arrival time of each chunk of the answer that contains tokens.
        counts: number of tokens in each chunk; over HTTP 1, unless the answer has token ids.
        ended: time when the answer ended, failed or was cancelled; None if the run stopped first.
        reported_tokens: number of output tokens as reported by the target; None if it reports none.
        cancelled: whether the client disconnected on purpose; such a request is neither a success
            nor a failure.
        failure, detail: kind of failure and its message; None and "" if the request did not fail.
        stages: seconds spent in each stage, as reported by the target.
        text: text of the answer, kept only for a comparison with a reference, and for a chat until
            its next turn.
        token_ids: token ids of the answer if the target reports them, kept as long as ``text``.
        chat: index of the chat to which the request belongs; None if it belongs to none.
        turn: number of the turn in its chat, from 1.
        cached_tokens: number of prompt tokens that the target found in its prefix cache; None if it
            does not report it.
    """

    number: int
    due: float
    input_tokens: int
    wanted_tokens: int
    sent: float | None = None
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended: float | None = None
    reported_tokens: int | None = None
    cancelled: bool = False
    failure: Failure | None = None
    detail: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    chat: int | None = None
    turn: int = 1
    cached_tokens: int | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the answer is complete."""
        return self.failure is None and not self.cancelled and self.ended is not None

    @property
    def output_tokens(self) -> int:
        """Number of output tokens as reported by the target, else as counted by the client."""
        return sum(self.counts) if self.reported_tokens is None else self.reported_tokens

    @property
    def first(self) -> float | None:
        """Arrival time of the first token."""
        return self.times[0] if self.times else None

    @property
    def last(self) -> float | None:
        """Arrival time of the last token."""
        return self.times[-1] if self.times else None
