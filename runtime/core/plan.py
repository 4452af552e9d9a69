"""Work of one engine step, as selected by the scheduler."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter

from runtime.core.limits import Limits
from runtime.core.sequence import Sequence, SequenceGroup
from runtime.errors import RuntimeFault

MAX_CHUNKS = 32
"""Maximum number of prompt chunks in a step."""

_left = attrgetter("left")
_OLDEST_PART = 4  # one in so many prompt tokens of a step is kept for the oldest prompt


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
class StepPlan:
    """Work of one engine step.

    Attributes:
        chunks: prompt chunks to prefill.
        decode: sequences to decode. The last token of a sequence may be in flight: sampled by a
            launched step, but not yet read by the host.
        reserved: groups admitted in this step whose KV will arrive from another worker.
        refused: pairs of request id and reason.
    """

    chunks: list[Chunk]
    decode: list[Sequence]
    reserved: list[SequenceGroup]
    refused: list[tuple[str, RuntimeFault]]


def choose_chunks(
    groups: Seq[SequenceGroup], decoded: int, limits: Limits, page_size: int
) -> list[Chunk]:
    """Choose the prompt chunks of a step that also decodes ``decoded`` sequences.

    The prompt with the fewest tokens left comes first, so that a long prompt does not delay shorter
    ones. A quarter of the prompt tokens is kept for the oldest prompt, so that none starves: each
    becomes the oldest one.

    Args:
        groups: groups to prefill, in order of admission.
    """
    if not groups:
        return []
    oldest, chunks = groups[0], []
    budget = max(limits.step_tokens - decoded, page_size)  # prefill always makes progress
    kept = max(budget // _OLDEST_PART // page_size * page_size, page_size)
    kept = min(kept, oldest.left)
    for group in sorted([oldest, *nsmallest(MAX_CHUNKS - 1, groups[1:], key=_left)], key=_left):
        if group is oldest:
            kept = 0
        count = min(limits.chunk_tokens, group.left)
        if count > budget - kept:
            count = (budget - kept) // page_size * page_size
        if count:
            chunks.append(Chunk(group, group.computed, count))
            budget -= count
    return chunks
