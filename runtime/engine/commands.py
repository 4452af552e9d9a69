"""Commands that an engine takes and the output of its steps."""

from dataclasses import dataclass, field

from runtime.core.request import FinishReason, PromptLogprobs, Request, SampledToken
from runtime.errors import RuntimeFault


@dataclass(frozen=True)
class Add:
    """Prefill a request here, then decode it.

    Attributes:
        hold: whether to stop after prefill. The first token of every choice is sampled, and the
            pages are kept until `Cancel`.
        receives: position up to which another worker sends the KV of the prompt, a multiple of the
            page size that is less than the number of tokens; 0 for none. Only held requests whose
            tokens are not evicted receive KV.
        worth: minimum number of tokens to receive. If this engine lacks fewer tokens before
            ``receives``, it computes them.
    """

    request: Request
    hold: bool = False
    receives: int = 0
    worth: int = 1


@dataclass(frozen=True)
class HistoryArrived:
    """End of the transfer of KV that an `Add` receives. Unknown ids are ignored.

    Attributes:
        complete: whether all KV is verified and in the pages. Otherwise the engine computes it.
    """

    id: str
    complete: bool


@dataclass(frozen=True)
class Pin:
    """Keep cached pages of a request until `Cancel`, so that another worker can read them.

    The pages are those of all full pages of the request before its last token. The step that takes
    the command reports them as chunks in `StepOutput.computed`, or refuses the request with
    `NotCached`. Nothing is allocated, so a `Pin` never waits.
    """

    request: Request


@dataclass(frozen=True)
class Reserve:
    """Allocate pages for a request's tokens. Another worker will send their KV.

    The step that takes the command reports the request in `StepOutput.reserved` or, if it must wait
    for pages or batch slots, in `StepOutput.deferred`. A later step then reports it as reserved.

    Tokens of the prompt that the other worker evicts get no pages.

    If cached pages hold all but a few tokens of the prompt, no other worker may be needed: see
    ``may_compute``. The decision is made when the request is admitted, because pages may be evicted
    until then. The prompt is then computed as with `Add`, and the request is reported in
    `StepOutput.started` instead of `StepOutput.reserved`.

    Attributes:
        may_reuse: maximum number of prompt tokens whose KV is taken from cached pages, so that it
            need not be sent; None for no limit.
        may_compute: maximum number of prompt tokens that this engine computes itself.
    """

    request: Request
    may_reuse: int | None = None
    may_compute: int = 0


@dataclass(frozen=True)
class Arrived:
    """Decode a reserved request, whose KV is now in its pages.

    A choice that ended with its first token is not decoded. The prefill worker has already reported
    it in ``finished``, so it is not reported again.

    Attributes:
        first: first token of every choice, sampled by the prefill worker.
    """

    id: str
    first: tuple[SampledToken, ...]


@dataclass(frozen=True)
class Cancel:
    """Drop a request in any state and free its pages. Unknown ids are ignored.

    This also ends a request that is held, after its pages were read.
    """

    id: str


@dataclass(frozen=True)
class CancelChoice:
    """End one choice of a request and free its pages and its batch slot.

    It is not reported in ``finished``. Unknown ids and choices that have ended are ignored. A
    choice whose prompt or KV is not complete ends when it would start to decode, because other
    choices share its pages or another worker writes to them.
    """

    id: str
    choice: int


Command = Add | HistoryArrived | Pin | Reserve | Arrived | Cancel | CancelChoice


@dataclass(frozen=True)
class Computed:
    """A prompt chunk whose computation was launched.

    Attributes:
        first_token: position of the chunk's first token, a multiple of the page size. It is 0 for
            the first chunk, which includes reused tokens (`SequenceGroup.reused`). A prompt with
            evicted tokens is reported once, as one chunk of the tokens that are kept.
        page_tables: for each page group, ids of the chunk's pages by their index in the chunk.
            Pages that the group does not hold are `FREED`, or left out at the end.
        ready: number of the event recorded once the KV is in the pages, for which other CUDA
            streams and other processes must wait (`PagedCache.events`). None if they need not wait.
        evicted: number of tokens that were evicted.
        completes: whether this is the last chunk of the prompt.
        samples: whether first tokens are sampled after this chunk. They are not if more chunks or
            forced tokens follow.
    """

    id: str
    first_token: int
    num_tokens: int
    page_tables: tuple[tuple[int, ...], ...]
    ready: int | None = None
    evicted: int = 0
    completes: bool = False
    samples: bool = False


@dataclass(frozen=True)
class Reserved:
    """Pages that were allocated for a request's tokens.

    Attributes:
        page_tables: for each page group, page ids by the index of the page in the sequence. Pages
            that are not sent in the group are `FREED`, or left out at the end.
        ready: number of the event after which no earlier work of the engine accesses the pages
            (`PagedCache.events`); None if there is nothing to wait for.
        first_token: position of the first token whose KV must be received, a multiple of the page
            size; see `SequenceGroup.reused`.
    """

    id: str
    page_tables: tuple[tuple[int, ...], ...]
    ready: int | None = None
    first_token: int = 0


@dataclass
class StepOutput:
    """Results of one step.

    Attributes:
        tokens: pairs of request id and sampled token, in sampling order.
        finished: request id, choice and reason of each choice that ended. The last token of a
            choice is in ``tokens`` of the same step.
        computed: chunks whose computation was launched, and those of a `Pin`. Chunks of a
            preempted sequence are reported again.
        reserved: pages allocated for KV that another worker will send. Those of an `Add` include
            pages of tokens after its ``receives``.
        deferred: ids of requests in a `Reserve` of this step for which there are no pages yet.
        refused: pairs of request id and reason. A refused request has no pages.
        started: ids of requests whose first chunk is computed in this step, or whose pages are
            pinned. A preempted request is reported again when its prefill restarts.
        reused: pairs of id and number of reused prompt tokens of requests in ``started`` that reuse
            some, including those that another worker has sent.
        prompt_logprobs: pairs of request id and log probabilities of prompt tokens. Those of a
            request are in order, without repetition, and precede its first token.
        ended: ids of requests whose choices have all finished. Their pages are released, except
            those of held requests.
    """

    tokens: list[tuple[str, SampledToken]] = field(default_factory=list)
    finished: list[tuple[str, int, FinishReason]] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    reserved: list[Reserved] = field(default_factory=list)
    deferred: list[str] = field(default_factory=list)
    refused: list[tuple[str, RuntimeFault]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    reused: list[tuple[str, int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[str, PromptLogprobs]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
