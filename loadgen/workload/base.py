"""Interfaces of workloads and tokenizers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """Content of one request, without its send time.

    Attributes:
        prompt: text, or token ids of the target's vocabulary.
        input_tokens: prompt tokens by the target's tokenizer.
        output_tokens: output tokens to request as ``max_tokens``.
        at: time in a trace, in seconds after its start; None if the arrival process gives the time.
    """

    prompt: str | tuple[int, ...]
    input_tokens: int
    output_tokens: int
    at: float | None = None


class Workload(Protocol):
    """Source of requests, reproducible by seed."""

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        """Yield requests, endlessly unless the source is finite."""
        ...


class Tokenizer(Protocol):
    """Tokenizer of the target's model."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...
