"""Work of one engine step, as selected by the scheduler."""

from dataclasses import dataclass

from runtime.core.sequence import Sequence, SequenceGroup
from runtime.errors import RuntimeFault


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
