"""What goes into an engine's step and what comes out of it."""

from dataclasses import dataclass, field

from runtime.core.request import FinishReason, Request, SampledToken
from runtime.errors import RuntimeFault


@dataclass(frozen=True)
class Add:
    """Prefill a request here, and decode it; or, with ``hold``, sample the first token of every
    choice and keep the pages until `Release`."""

    request: Request
    hold: bool = False


@dataclass(frozen=True)
class Reserve:
    """Give a request the pages of its tokens: their KV comes from another worker."""

    request: Request


@dataclass(frozen=True)
class Arrived:
    """The KV of a reserved request is in its pages: decode every choice from its first token.

    A choice that its first token ended is not run, and not reported as finished again.
    """

    id: str
    first: tuple[SampledToken, ...]


@dataclass(frozen=True)
class Cancel:
    """Forget a request and free its pages, at any time. Unknown ids are ignored."""

    id: str


@dataclass(frozen=True)
class Release:
    """Free the pages of a request that was held. Unknown ids are ignored."""

    id: str


Command = Add | Reserve | Arrived | Cancel | Release


@dataclass(frozen=True)
class Computed:
    """A chunk whose KV is in the pages now.

    ``first_token`` is a multiple of the page size; ``pages`` hold this chunk's tokens.
    """

    id: str
    first_token: int
    num_tokens: int
    pages: tuple[int, ...]


@dataclass
class StepOutput:
    """What one step did.

    Attributes:
        tokens: request id and token, in the order in which they were sampled.
        finished: request id, choice and reason; a choice's last token is in ``tokens``.
        computed: chunks whose KV is in the pages now. Those of a sequence that was preempted are
            reported again.
        reserved: request id and the pages of its tokens.
        refused: request id and why; nothing of it is left.
        started: requests whose first chunk this step computes. One that was preempted starts again.
        ended: requests all of whose choices finished; their pages are returned unless held.
    """

    tokens: list[tuple[str, SampledToken]] = field(default_factory=list)
    finished: list[tuple[str, int, FinishReason]] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    reserved: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    refused: list[tuple[str, RuntimeFault]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
