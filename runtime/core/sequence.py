"""Sequences, and groups of sequences that share a prompt."""

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self

from runtime.core.request import FinishReason, Request
from runtime.grammar.matcher import Matcher
from runtime.pages.prefix import PageHashes


class Purpose(Enum):
    """Task of a sequence group on this worker.

    Attributes:
        GENERATE: prefill the prompt, then decode.
        HOLD: prefill the prompt, then keep its pages until another worker has read them.
        RECEIVE: receive the KV from another worker, then decode.
    """

    GENERATE = "generate"
    HOLD = "hold"
    RECEIVE = "receive"


FREED = -1
"""Entry of a page table for a page that the page group does not hold."""


@dataclass(eq=False, slots=True)
class SequenceState:
    """One choice of a request: its tokens so far, and the pages that hold their KV.

    The scheduler changes it. Executors read it or a copy of it, and identify it by ``arrival``.

    Attributes:
        choice: index of the choice, from 0.
        arrival: number of sequences that were submitted to the engine before this one, which
            identifies it. It orders sequences from oldest to youngest.
        tokens: token ids so far, without those in ``forced``.
        limit: maximum length in tokens, including the prompt.
        page_tables: for each page group, page ids by the index of the page in the sequence. Pages
            that the group does not hold are `FREED`. Empty for a sequence without pages.
        forced: known output tokens that follow ``tokens``, to be computed again. Each decode step
            takes one of them in place of a sampled token. They are not prefilled with the prompt,
            because output tokens attend to encoded pages or to the tokens that eviction has kept,
            and prefill does not.
        evicts: number of prompt tokens to evict from each KV head, see `runtime.pages.eviction`.
        evicted: number of tokens that are evicted: 0 until the prompt is complete, then ``evicts``.
        running: whether the sequence is in the decode batch.
        lookahead: number of tokens in flight: sampled by launched steps, but not yet read by the
            host.
        cancelled: whether the choice was cancelled before its prompt was computed or its KV
            received. It ends when it would otherwise start to run.
        hashes: hashes by which others find the pages of the sequence; None if they must not.
        resolved: False if the device could not sample the last token. The host must then complete
            the sampling, and read the step before it launches the next one.
        matcher: state of the request's grammar after some of the output tokens; None before the
            first token is sampled here, and without a grammar.
    """

    request: Request
    choice: int
    arrival: int
    tokens: list[int]
    limit: int
    page_tables: list[list[int]] = field(default_factory=list)
    forced: deque[int] = field(default_factory=deque)
    evicts: int = 0
    evicted: int = 0
    running: bool = False
    lookahead: int = 0
    cancelled: bool = False
    resolved: bool = True
    hashes: PageHashes | None = None
    matcher: Matcher | None = None

    @property
    def length(self) -> int:
        """Number of tokens, including the ``lookahead`` tokens in flight."""
        return len(self.tokens) + self.lookahead

    @property
    def kv_length(self) -> int:
        """Number of tokens in the pages of each KV head: ``length`` without evicted tokens."""
        return self.length - self.evicted

    @property
    def known(self) -> int:
        """Number of tokens whose ids the host knows: those in ``tokens`` and in ``forced``."""
        return len(self.tokens) + len(self.forced)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the sequence ends with its last known token; None if it continues."""
        return self.request.finish_reason(self.tokens[-1], len(self.tokens), self.limit)

    def is_choice(self, request_id: str, choice: int) -> bool:
        """Return whether this is a choice of a request."""
        return self.choice == choice and self.request.id == request_id

    def after_eviction(self, vacated: range) -> "SequenceState":
        """Return a copy of the sequence in its state after the eviction of prompt tokens.

        Args:
            vacated: indices of the pages that the eviction leaves without tokens, see
                `runtime.pages.eviction.vacated_pages`. They are removed from all page tables.
        """
        tables = [table[: vacated.start] + table[vacated.stop :] for table in self.page_tables]
        return replace(self, evicted=self.evicts, page_tables=tables)

    def rewind(self, end: int) -> None:
        """Shorten the sequence to ``end`` tokens. All later tokens become forced ones."""
        self.forced.extendleft(reversed(self.tokens[end:]))
        del self.tokens[end:]


@dataclass(eq=False)
class SequenceGroup:
    """Sequences that share a prompt and are scheduled together until its prefill completes.

    Attributes:
        computed: number of prompt tokens whose KV is in the pages; changed by
            `SequencePages.set_computed` alone.
        position: number of prompt tokens that were admitted to prefill before this group, or None
            until it is admitted. Preempted prompts keep it; preempted running sequences have 0.
        reused: number of prompt tokens whose KV was in the pages when the group was admitted, so
            that its first chunk starts after them, or another worker sends the KV that follows
            them; a multiple of the page size.
        may_reuse: maximum of ``reused``; None for no limit.
        may_compute: if at most this many prompt tokens are not in cached pages when a group with
            `Purpose.RECEIVE` is admitted, its purpose becomes `Purpose.GENERATE`.
        receives: position up to which another worker sends KV of a prompt that is held; 0 for none.
        worth: minimum number of tokens to receive; see `runtime.engine.Add`.
        scored: number of prompt positions whose log probabilities were computed, or are not wanted.
        leader: group that computes the first ``shared`` tokens of this one, which waits for them;
            None if it need not wait.
    """

    purpose: Purpose
    sequences: list[SequenceState]
    computed: int = 0
    position: int | None = None
    reused: int = 0
    may_reuse: int | None = None
    may_compute: int = 0
    receives: int = 0
    worth: int = 1
    scored: int = 0
    leader: "SequenceGroup | None" = None
    shared: int = 0

    @classmethod
    def of(
        cls,
        request: Request,
        purpose: Purpose,
        arrival: int,
        *,
        limit: int,
        evicts: int,
        choices: int | None = None,
    ) -> Self:
        """Return the group of a new request; see `SequenceState` for the arguments.

        Args:
            arrival: arrival of the first choice; each further choice has the next number.
            choices: number of choices that get a sequence, the first ones; None for all.
        """
        sequences = [
            SequenceState(
                request, choice, arrival + choice, [*request.tokens], limit, evicts=evicts
            )
            for choice in range(request.choices if choices is None else choices)
        ]
        return cls(purpose, sequences)

    @property
    def request(self) -> Request:
        """Request that all sequences belong to."""
        return self.sequences[0].request

    @property
    def tokens(self) -> list[int]:
        """Token ids of the first sequence. Until prefill completes, all sequences have the same."""
        return self.sequences[0].tokens

    @property
    def arrival(self) -> int:
        """`SequenceState.arrival` of the first sequence. It identifies the group."""
        return self.sequences[0].arrival

    @property
    def evicts(self) -> int:
        """See `SequenceState`; all sequences evict the same number of prompt tokens."""
        return self.sequences[0].evicts

    @property
    def left(self) -> int:
        """Number of prompt tokens that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def lacks_history(self) -> bool:
        """Whether enough KV before ``receives`` is missing to receive it from another worker."""
        return self.receives - self.reused >= max(self.worth, 1)

    @property
    def queued(self) -> int:
        """Tokens of the group in `Scheduler.queue_tokens`.

        For a prompt that will be held, these are the ``left`` tokens, otherwise all known tokens.
        """
        if self.purpose is Purpose.HOLD:
            return self.left
        return sum(sequence.known for sequence in self.sequences)

    @property
    def slots(self) -> int:
        """Number of batch slots the group needs."""
        return len(self.sequences)
