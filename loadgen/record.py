"""What is known of one request when a run is over: measures are made of nothing else."""

from dataclasses import dataclass, field
from enum import StrEnum


class Failure(StrEnum):
    """How a request failed, as its client saw it. Each failed request has exactly one."""

    REFUSED = "refused"
    """No connection could be made."""
    RESET = "reset"
    """The connection was closed, or reset, before an answer had begun."""
    INTERRUPTED = "interrupted"
    """The answer stopped in its middle: a reset, or an end without a last event."""
    TIMEOUT = "timeout"
    """No end within the request's time limit."""
    REJECTED = "rejected"
    """Status 429 or 503, or RESOURCE_EXHAUSTED or UNAVAILABLE: the server is too busy."""
    CLIENT_ERROR = "client_error"
    """Any other status 4xx: the request was wrong."""
    SERVER_ERROR = "server_error"
    """Any other status, or an error that an answer ended with."""
    MALFORMED = "malformed"
    """An answer that is no answer: not HTTP, not events, not JSON, or without a token."""


@dataclass(slots=True)
class Record:
    """One request. Times are seconds on one monotonic clock, 0 at the start of the run.

    Attributes:
        number: in the order of due times.
        due: when it was to be sent, drawn before the run.
        input_tokens: of the prompt, by the target's tokenizer; where the target tells, its word.
        wanted_tokens: of output, asked for as ``max_tokens``.
        sent: when its sending began, a connection included; None: it never did.
        times: when each piece of the answer came that had tokens in it.
        counts: how many tokens each piece had; over HTTP, which does not tell, 1.
        ended: when the answer ended, the failure was seen, or the client left; None: the run was
            stopped before.
        reported_tokens: of output, by the target's own count, if it told.
        cancelled: the client left on purpose; neither a success nor a failure.
        failure, detail: how it failed, and what was seen; None and "": it did not.
        stages: seconds that the target says it spent in each stage.
        text: the answer, where it is to be compared.
        token_ids: likewise, of targets that tell.
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

    @property
    def succeeded(self) -> bool:
        """Whether it has all of its answer."""
        return self.failure is None and not self.cancelled and self.ended is not None

    @property
    def output_tokens(self) -> int:
        """As the target counts them, or as they were counted here."""
        return sum(self.counts) if self.reported_tokens is None else self.reported_tokens

    @property
    def first(self) -> float | None:
        """When the first token came."""
        return self.times[0] if self.times else None

    @property
    def last(self) -> float | None:
        """When the last token came."""
        return self.times[-1] if self.times else None
