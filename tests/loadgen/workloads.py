"""Workload that repeats one request, and prompts of single requests."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from loadgen.workload.base import Dialogue, RequestSpec, Text


@dataclass(frozen=True)
class Same:
    """Endless repetition of one request."""

    spec: RequestSpec

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        return repeat(self.spec)


def single(spec: RequestSpec) -> Text:
    """Return the prompt of a request that belongs to no chat."""
    assert not isinstance(spec.prompt, Dialogue)
    return spec.prompt
