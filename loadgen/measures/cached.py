"""Prompt tokens that the target found in its prefix cache, as a fraction of all prompt tokens.

Targets report them as ``usage.prompt_tokens_details.cached_tokens``. Only requests whose answers
report them are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from loadgen.record import Record


@dataclass(frozen=True)
class Cached:
    """Cached prompt tokens of some requests.

    Attributes:
        requests: number of requests whose answers report cached tokens.
        tokens: cached prompt tokens of these requests.
        input_tokens: all prompt tokens of these requests.
        fraction: ``tokens / input_tokens``.
        mean_fraction: mean of each request's fraction.
    """

    requests: int
    tokens: int
    input_tokens: int
    fraction: float
    mean_fraction: float

    @classmethod
    def of(cls, records: Sequence[Record]) -> Self | None:
        """Return the cached tokens of the answered requests; None if no answer reports them."""
        reported = [
            (record.cached_tokens, record.input_tokens)
            for record in records
            if record.succeeded and record.cached_tokens is not None and record.input_tokens
        ]
        if not reported:
            return None
        tokens, input_tokens = map(sum, zip(*reported, strict=True))
        mean = sum(cached / whole for cached, whole in reported) / len(reported)
        return cls(len(reported), tokens, input_tokens, tokens / input_tokens, mean)
