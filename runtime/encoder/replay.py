"""Small batches under CUDA graphs, because launches take longer than their kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.encoder.batch import RaggedBatch
from runtime.graphs.capture import captured

BUCKETS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Numbers of tokens for which graphs are captured."""
_MIN_INPUTS, _TOKENS_PER_INPUT = 16, 16
"""A graph has an input for each 16 of its tokens, and at least 16 inputs."""


def bucket_of(tokens: int, inputs: int) -> int | None:
    """Return the smallest bucket for a batch, or None if it is too large."""
    fitting = (size for size in BUCKETS if tokens <= size and inputs <= _inputs(size))
    return next(fitting, None)


class ReplayedBackbone:
    """A backbone that replays graphs for batches of up to 4,096 tokens.

    A batch is padded to the tokens and inputs of its bucket. The results are those of the padded
    batch: with other numbers of rows, torch may select other matmul kernels.

    A result is a view of the graph's memory, which the next call overwrites.

    Args:
        backbone: hidden states `[n, hidden]` of a batch. It may only launch work, and attention
            may not depend on `RaggedBatch.lengths`, except on their number.
        pool: memory pool of the graphs, see `runtime.graphs.capture.captured`.

    Attributes:
        name: identity of the attention kernels.
    """

    def __init__(
        self, backbone: Callable[[RaggedBatch], Tensor], name: str, device: torch.device, pool: Any
    ) -> None:
        self.name = name
        self._backbone = backbone
        self._device = device
        self._pool = pool
        self._replays: dict[int, _Replay] = {}

    def __call__(self, batch: RaggedBatch) -> Tensor:
        bucket = bucket_of(len(batch.tokens), len(batch.lengths))
        return self._backbone(batch) if bucket is None else self._replay(bucket)(batch)

    def warm_up(self) -> None:
        """Capture all graphs, the largest first. Otherwise, each is captured at first use."""
        for bucket in reversed(BUCKETS):
            self._replay(bucket)

    def _replay(self, bucket: int) -> "_Replay":
        if bucket not in self._replays:
            self._replays[bucket] = _Replay(self._backbone, bucket, self._device, self._pool)
        return self._replays[bucket]


class _Replay:
    """The graph of one bucket and its input tensors.

    Rows after those of a batch keep earlier tokens. They belong to no input.
    """

    def __init__(
        self,
        backbone: Callable[[RaggedBatch], Tensor],
        bucket: int,
        device: torch.device,
        pool: Any,
    ) -> None:
        tokens, positions, types = torch.zeros(3, bucket, dtype=torch.int64, device=device)
        starts = torch.zeros(_inputs(bucket) + 1, dtype=torch.int32, device=device)
        lengths = (bucket, *[0] * (_inputs(bucket) - 1))
        self._backbone = backbone
        self._batch = RaggedBatch(tokens, types, positions, starts, lengths)
        self._run = captured(self._compute, pool)

    def _compute(self) -> None:
        self._hidden = self._backbone(self._batch)

    def __call__(self, batch: RaggedBatch) -> Tensor:
        n, ends = len(batch.tokens), len(batch.starts)
        static = self._batch
        static.tokens[:n] = batch.tokens
        static.positions[:n] = batch.positions
        assert static.types is not None
        static.types[:n] = 0 if batch.types is None else batch.types
        static.starts[:ends] = batch.starts
        static.starts[ends:] = n
        self._run()
        return self._hidden[:n]


def _inputs(bucket: int) -> int:
    """Return the number of inputs of a bucket's graph."""
    return max(_MIN_INPUTS, bucket // _TOKENS_PER_INPUT)
