"""Workload that repeats one request."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from loadgen.workload.base import RequestSpec


@dataclass(frozen=True)
class Same:
    """Endless repetition of one request."""

    spec: RequestSpec

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        return repeat(self.spec)
