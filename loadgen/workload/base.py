"""What is asked, and how long the answers are to be."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, before anybody knows when it is sent.

    Attributes:
        prompt: text, or token ids of the target's own vocabulary.
        input_tokens: of the prompt, by the target's tokenizer.
        output_tokens: to be asked for as ``max_tokens``.
        at: seconds after the start at which a trace has it; None: arrivals say.
    """

    prompt: str | tuple[int, ...]
    input_tokens: int
    output_tokens: int
    at: float | None = None


class Workload(Protocol):
    """A source of requests, the same ones for the same seed."""

    def asks(self, seed: int) -> Iterator[Ask]:
        """Without an end, unless the source has one."""
        ...


class Tokenizer(Protocol):
    """The target's."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...
