"""Work of one engine step, as selected by the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from runtime.core.limits import Limits
from runtime.core.sequence import SequenceGroup, SequenceState
from runtime.errors import RuntimeFault
from runtime.pages.plan import PagePlan

MAX_CHUNKS = 32
"""Maximum number of prompt chunks in a step."""

_OVERTAKING = 4
"""Weight of the prompt tokens left in the order of prompts. Of the values 0 to 4, this one had the
lowest p99 of first tokens in simulations near saturation."""


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens at positions ``first … first + count - 1`` of a group, to prefill in a step."""

    group: SequenceGroup
    first: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether this is the last chunk of the prompt."""
        return self.first + self.count == len(self.group.tokens)


@dataclass(frozen=True)
class StepSize:
    """Amount of work of one engine step. Its duration grows with each of the three.

    Attributes:
        decoded: number of sequences that it decodes.
        tokens: number of tokens that it computes: one for each decoded sequence, and those of the
            prompt chunks.
        context: sum over these tokens of the number of tokens that each attends to.
    """

    decoded: int
    tokens: int
    context: int


@dataclass(frozen=True)
class StepPlan:
    """Work of one engine step.

    Attributes:
        chunks: prompt chunks to prefill.
        decode: sequences to decode. The last token of a sequence may be in flight: sampled by a
            launched step, but not yet read by the host.
        reserved: groups admitted in this step whose KV will arrive from another worker.
        deferred: groups submitted since the last step that wait to become `reserved`.
        refused: pairs of request id and reason.
    """

    chunks: list[Chunk]
    decode: list[SequenceState]
    reserved: list[SequenceGroup]
    deferred: list[SequenceGroup]
    refused: list[tuple[str, RuntimeFault]]

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

    Prompts are computed in the order of ``position + 4 * left``. A short prompt overtakes longer
    ones, but a prompt of n tokens waits for less than 3 n tokens of prompts admitted after it.
    Sequences that were preempted while running have position 0. What is left of a step after a
    chunk of ``chunk_tokens`` goes to the next prompts in this order.

    Args:
        groups: groups to prefill.
    """
    chunks = []
    budget = max(limits.step_tokens - decoded, pages.page_size)  # prefill always makes progress
    for group in nsmallest(MAX_CHUNKS, groups, key=_turn):
        count = min(limits.chunk_tokens, group.left)
        if count > budget:
            count = pages.full(budget) * pages.page_size
        if count:
            chunks.append(Chunk(group, group.computed, count))
            budget -= count
    return chunks


def _turn(group: SequenceGroup) -> int:
    return (group.position or 0) + _OVERTAKING * group.left
