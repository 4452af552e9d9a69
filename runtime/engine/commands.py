"""Commands that an engine takes and the output of its steps."""

from dataclasses import dataclass, field

from runtime.core.request import FinishReason, Request, SampledToken
from runtime.errors import RuntimeFault


@dataclass(frozen=True)
class Add:
    """Prefill a request here, then decode it.

    Attributes:
        hold: do not decode; sample the first token of every choice and keep the pages until
            `Release`.
    """

    request: Request
    hold: bool = False


@dataclass(frozen=True)
class Reserve:
    """Allocate the pages of a request's tokens, whose KV another worker will send."""

    request: Request


@dataclass(frozen=True)
class Arrived:
    """The KV of a reserved request is in its pages: decode every choice from its first token.

    A choice that ended with its first token is neither run nor reported as finished again.

    Attributes:
        first: the first token of every choice.
    """

    id: str
    first: tuple[SampledToken, ...]


@dataclass(frozen=True)
class Cancel:
    """Drop a request in any state and free its pages. Unknown ids are ignored."""

    id: str


@dataclass(frozen=True)
class Release:
    """Free the pages of a held request. Unknown ids are ignored."""

    id: str


Command = Add | Reserve | Arrived | Cancel | Release


@dataclass(frozen=True)
class Computed:
    """A prompt chunk whose KV has been written.

    Attributes:
        first_token: position of the first token, a multiple of the page size.
        pages: pages that hold the chunk's tokens.
    """

    id: str
    first_token: int
    num_tokens: int
    pages: tuple[int, ...]


@dataclass
class StepOutput:
    """Results of one step.

    Attributes:
        tokens: request ids with sampled tokens, in sampling order.
        finished: choices that ended: request id, choice and reason. The last token of a choice is
            in ``tokens`` of the same step.
        computed: chunks whose KV was written. Chunks of a preempted sequence are reported again.
        reserved: request ids with the pages allocated for their tokens.
        refused: request ids with the reason. All pages of a refused request are free again.
        started: requests whose first chunk this step computes. A preempted request starts again.
        ended: requests whose choices all finished. Their pages are free, unless held.
    """

    tokens: list[tuple[str, SampledToken]] = field(default_factory=list)
    finished: list[tuple[str, int, FinishReason]] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    reserved: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    refused: list[tuple[str, RuntimeFault]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
