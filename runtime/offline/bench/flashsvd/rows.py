"""Cases of the benchmark, and the figures of each backend."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Case(NamedTuple):
    """A model and a batch.

    Attributes:
        keep: fraction of the parameters that each factor pair keeps, ``full`` for full rank, or
            ``dense``.
        batch, length: number of inputs, and their tokens.
    """

    keep: str
    batch: int
    length: int

    def __str__(self) -> str:
        return f"keep {self.keep}, {self.batch} x {self.length}"


@dataclass(frozen=True)
class Row:
    """Figures of one backend for one case.

    Attributes:
        ms: time of the batch under a CUDA graph, in milliseconds.
        floor_ms: time of its floating-point operations at the rate of one large matmul.
        peak: maximum of the allocated bytes from before the weights are loaded to the last run.
        weights: bytes allocated by loading the model.
        activations: bytes that one run without a graph needs beyond what stays allocated.
        cosine: smallest cosine similarity of a hidden state to that of the first backend.
    """

    ms: float
    floor_ms: float
    peak: int
    weights: int
    activations: int
    cosine: float

    @property
    def workspace(self) -> int:
        """Bytes of libraries and of the graph's own memory: the rest of the peak."""
        return self.peak - self.weights - self.activations


Rows = Mapping[str, Row]
"""The rows of a case, by backend."""
