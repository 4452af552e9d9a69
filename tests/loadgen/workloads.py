"""A workload that is the same again and again."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from loadgen.workload.base import Ask


@dataclass(frozen=True)
class Same:
    """One request, over and over."""

    ask: Ask

    def asks(self, seed: int) -> Iterator[Ask]:
        return repeat(self.ask)
