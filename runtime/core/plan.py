"""Plan of one engine step, as the scheduler makes it."""

from dataclasses import dataclass

from runtime.core.sequence import Sequence, SequenceGroup
from runtime.errors import RuntimeFault


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens ``first … first + count - 1`` of a group, to compute in this step."""

    group: SequenceGroup
    first: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether this is the last chunk of the prompt."""
        return self.first + self.count == len(self.group.tokens)


@dataclass(frozen=True)
class StepPlan:
    """One step of an engine.

    Attributes:
        chunks: prompt chunks to prefill.
        decode: sequences to decode. The last token of a sequence may be in flight, that is, not
            read by the host yet.
        reserved: groups that received pages for KV from another worker.
        refused: request ids, each with the reason it was refused.
    """

    chunks: list[Chunk]
    decode: list[Sequence]
    reserved: list[SequenceGroup]
    refused: list[tuple[str, RuntimeFault]]
