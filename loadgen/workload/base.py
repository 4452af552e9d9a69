"""Interfaces of workloads and tokenizers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """Content of one request, without its send time.

    Attributes:
        prompt: text, or token ids of the target's vocabulary.
        input_tokens: number of prompt tokens as counted by the target's tokenizer.
        output_tokens: number of output tokens to request as ``max_tokens``.
        at: send time in a trace, in seconds after its start; None if the source has no times.
    """

    prompt: str | tuple[int, ...]
    input_tokens: int
    output_tokens: int
    at: float | None = None


class Workload(Protocol):
    """Source of requests, reproducible by seed."""

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        """Yield requests; the sequence is endless unless the source is finite."""
        ...


class Tokenizer(Protocol):
    """Tokenizer of the target's model."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...
