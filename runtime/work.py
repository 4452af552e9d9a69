"""What the scheduler moves about: sequences, the work they wait for, and one step's plan."""

from dataclasses import dataclass, field
from enum import Enum

from runtime.errors import RuntimeFault
from runtime.sampling import Row
from runtime.sequence import Request


@dataclass(frozen=True)
class Limits:
    """Bounds of one engine.

    Attributes:
        max_running: sequences (choices) that are in work at a time.
        max_waiting: requests that may wait for a seat or for pages.
        step_tokens: prompt tokens that one step computes at most.
        chunk_tokens: prompt tokens of one sequence that one step computes at most, a multiple of
            the page size.
    """

    max_running: int
    max_waiting: int
    step_tokens: int = 512
    chunk_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "step_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.chunk_tokens > self.step_tokens:
            raise ValueError(
                f"chunk_tokens ({self.chunk_tokens}) must be at most "
                f"step_tokens ({self.step_tokens})"
            )


class Aim(Enum):
    """What becomes of a piece of work."""

    RUN = "run"  # prefill here, then decode
    HOLD = "hold"  # prefill here, then keep the pages for another worker
    RECEIVE = "receive"  # the KV comes from another worker, then decode


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request: its tokens so far, and the pages that hold their KV.

    Attributes:
        limit: tokens at which it ends, whatever they are.
        running: whether it is in the decode batch.
        ahead: tokens that launched steps draw for it, and that the host does not know yet.
        decided: False while a draw of its needs the host: its step is read before another one is
            launched.
    """

    request: Request
    choice: int
    arrival: int
    tokens: list[int]
    limit: int
    pages: list[int] = field(default_factory=list)
    running: bool = False
    ahead: int = 0
    decided: bool = True

    @property
    def length(self) -> int:
        """Tokens, with those that are being drawn."""
        return len(self.tokens) + self.ahead

    @property
    def age(self) -> tuple[int, int]:
        """Orders sequences, the oldest first."""
        return self.arrival, self.choice


@dataclass(eq=False)
class Work:
    """Sequences that start from the same tokens, of which ``computed`` are in the pages."""

    aim: Aim
    sequences: list[Sequence]
    computed: int = 0

    @property
    def request(self) -> Request:
        return self.sequences[0].request

    @property
    def tokens(self) -> list[int]:
        return self.sequences[0].tokens

    @property
    def age(self) -> tuple[int, int]:
        return self.sequences[0].age

    @property
    def seats(self) -> int:
        return 1 if self.aim is Aim.HOLD else len(self.sequences)


@dataclass(frozen=True)
class Chunk:
    """Tokens ``first … first + count - 1`` of a piece of work, to be computed in this step."""

    work: Work
    first: int
    count: int

    @property
    def completes(self) -> bool:
        return self.first + self.count == len(self.work.tokens)


@dataclass(frozen=True)
class Plan:
    """One step: chunks to prefill, sequences to decode, and what was decided on the way.

    The last token of a sequence to decode may still be in the making.
    """

    chunks: list[Chunk]
    decode: list[Sequence]
    reserved: list[Work]
    refused: list[tuple[str, RuntimeFault]]


def row_of(sequence: Sequence) -> Row:
    """How the sampler sees a sequence."""
    request = sequence.request
    return Row(request.sampling, sequence.choice, sequence.tokens, request.prompt_tokens)
