"""Work of one engine step, as selected by the scheduler."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from runtime.core.limits import Limits
from runtime.core.sequence import Sequence, SequenceGroup
from runtime.errors import RuntimeFault

MAX_CHUNKS = 32
"""Maximum number of prompt chunks in a step."""


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
    groups: Iterable[SequenceGroup], decoded: int, limits: Limits, page_size: int
) -> list[Chunk]:
    """Choose the prompt chunks of a step that also decodes ``decoded`` sequences.

    Args:
        groups: groups to prefill, in order.
    """
    chunks = []
    budget = max(limits.step_tokens - decoded, page_size)  # prefill always makes progress
    for group in islice(groups, MAX_CHUNKS):
        count = min(limits.chunk_tokens, len(group.tokens) - group.computed)
        if count > budget:
            count = budget // page_size * page_size
        if not count:
            break
        chunks.append(Chunk(group, group.computed, count))
        budget -= count
    return chunks
