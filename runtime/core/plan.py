"""Work of one engine step, as selected by the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from runtime.core.limits import Limits
from runtime.core.sequence import SequenceGroup, SequenceState
from runtime.errors import RuntimeFault
from runtime.pages.eviction import vacated_pages
from runtime.pages.plan import PagePlan

MAX_CHUNKS = 32
"""Maximum number of prompt chunks in a step."""

_OVERTAKING = 4
"""Weight of the uncomputed prompt tokens in the order of prompts (`choose_chunks`).

Of the values 0 to 4, this one had the lowest p99 time to first token in simulations near
saturation.
"""


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens at positions ``first … end - 1`` of a sequence group, to prefill in a step.

    Attributes:
        vacated: indices of the pages that the eviction after this chunk leaves without tokens, see
            `runtime.pages.eviction.vacated_pages`; empty if no eviction follows this chunk.
        scored: positions of the chunk after which the log probability of the next prompt token is
            computed.
    """

    group: SequenceGroup
    first: int
    count: int
    vacated: range = range(0)
    scored: range = range(0)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.first + self.count

    @property
    def starts(self) -> bool:
        """Whether this is the first chunk of the prompt."""
        return self.first == self.group.reused

    @property
    def completes(self) -> bool:
        """Whether this is the last chunk of the prompt."""
        return self.end == len(self.group.tokens)

    @property
    def samples(self) -> bool:
        """Whether first tokens are sampled after this chunk.

        They are if it is the last chunk and the sequences have no `SequenceState.forced` tokens.
        """
        return self.completes and not self.group.sequences[0].forced

    @property
    def prompt(self) -> SequenceState:
        """First sequence of the group, in its state after the step; see `completed`."""
        return self.completed[0] if self.completes else self.group.sequences[0]

    @property
    def completed(self) -> list[SequenceState]:
        """Sequences whose prompt is complete after the step; empty if this is not the last chunk.

        If tokens are evicted, these are copies after the eviction, because only the scheduler
        changes sequences.
        """
        if not self.completes:
            return []
        if not self.vacated:
            return self.group.sequences
        return [sequence.after_eviction(self.vacated) for sequence in self.group.sequences]


@dataclass(frozen=True)
class StepSize:
    """Amount of work of one engine step. The duration of the step grows with each attribute.

    Attributes:
        decoded: number of sequences that the step decodes.
        tokens: number of tokens that the step computes: one for each decoded sequence, and those
            of the prompt chunks.
        context: sum over these tokens of the number of tokens that each attends to.
    """

    decoded: int
    tokens: int
    context: int

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens that the step computes."""
        return self.tokens - self.decoded


@dataclass(frozen=True)
class StepPlan:
    """Work of one engine step.

    Executors do not change it. A rank in another process computes a copy.

    Attributes:
        chunks: prompt chunks to prefill.
        decode: sequences to decode. The last token of a sequence may be in flight: sampled by a
            launched step, but not yet read by the host.
        reserved: groups admitted in this step whose KV will arrive from another worker.
        deferred: groups submitted since the last step that wait to become `reserved`.
        refused: pairs of request id and reason.
        prefilling: `SequenceGroup.arrival` of all groups that this or a later step prefills.
            Executors may drop what they have stored about the chunks of other groups.
    """

    chunks: list[Chunk]
    decode: list[SequenceState]
    reserved: list[SequenceGroup]
    deferred: list[SequenceGroup]
    refused: list[tuple[str, RuntimeFault]]
    prefilling: frozenset[int]

    @property
    def sampled(self) -> list[SequenceState]:
        """Sequences for which the step samples a token, in the order of its draws.

        These are the sequences to decode, then all choices of the prompts that the step completes.
        Sequences whose next token is forced are left out.
        """
        completed = [s for chunk in self.chunks if chunk.completes for s in chunk.group.sequences]
        return [sequence for sequence in (*self.decode, *completed) if not sequence.forced]

    @property
    def constrained(self) -> bool:
        """Whether a grammar constrains a token that the step samples."""
        return any(sequence.request.sampling.constrained for sequence in self.sampled)

    @property
    def size(self) -> StepSize:
        """Amount of work."""
        decoded = len(self.decode)
        context = sum(sequence.kv_length for sequence in self.decode)
        tokens = decoded
        for chunk in self.chunks:
            tokens += chunk.count
            context += chunk.count * chunk.first + chunk.count * (chunk.count + 1) // 2
        return StepSize(decoded, tokens, context)


def choose_chunks(
    groups: Sequence[SequenceGroup], decoded: int, limits: Limits, pages: PagePlan
) -> list[Chunk]:
    """Choose the prompt chunks of a step that also decodes ``decoded`` sequences.

    Prompts are computed in ascending order of ``position + 4 * left`` (see `SequenceGroup`). A
    short prompt overtakes longer ones, but a prompt of n tokens waits for less than 3 n tokens of
    prompts admitted after it. Sequences that were preempted while running have position 0. If a
    chunk does not use up the tokens of the step, the next prompts in this order get the rest.

    Args:
        groups: groups to prefill.
    """
    chunks = []
    # At least one page, so that prefill always makes progress.
    budget = max(limits.step_tokens - decoded, pages.page_size)
    for group in nsmallest(MAX_CHUNKS, groups, key=_turn):
        count = min(limits.chunk_tokens, group.left)
        if count > budget:
            count = pages.full(budget) * pages.page_size
        if count:
            evicts = group.evicts if count == group.left else 0
            vacated = vacated_pages(len(group.tokens), evicts, pages.page_size)
            scored = _scored(group, range(group.computed, group.computed + count))
            chunks.append(Chunk(group, group.computed, count, vacated, scored))
            budget -= count
    return chunks


def _turn(group: SequenceGroup) -> int:
    return (group.position or 0) + _OVERTAKING * group.left


def _scored(group: SequenceGroup, computed: range) -> range:
    """Return `Chunk.scored` of a chunk of these positions.

    Positions that a preempted prompt computes again are not scored again.
    """
    request = group.request
    if request.sampling.prompt_logprobs is None:
        return range(0)
    first = max(computed.start, group.scored)
    return range(first, max(first, min(computed.stop, request.prompt_tokens - 1)))
