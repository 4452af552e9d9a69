"""Chunks of prompts as CUDA graphs: a few tokens are computed before the host has launched a layer.

There is a graph for some numbers of tokens and of sequences, with logits and without; a batch takes
the smallest that it fits. Tensors of a graph's batch stay: the host writes into them what a batch
is. The rest are tokens of nobody, in the cache's last page. Larger batches are not replayed: the
device is busy with them for longer than the host.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.graphs.capture import capture
from runtime.graphs.host_copy import to_device
from runtime.kv.cache import PagedCache
from runtime.kv.pages import pages_for
from runtime.models.model import Model

TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
SEQUENCES = (1, 8)
_WRITTEN = ("tokens", "positions", "starts", "lengths", "sequences")


class PrefillReplay:
    """Prefill of one model over one cache, whose last page must be nobody's.

    ``most`` tokens are in a batch at most. Graphs are captured by `warm_up` or at first use; on the
    CPU the same batches are computed without.
    """

    def __init__(self, model: Model, cache: PagedCache, most: int) -> None:
        self._model, self._cache = model, cache
        most = min(most, TOKENS[-1], model.context_length)  # nobody's tokens have positions, too
        self._tokens = [*(tokens for tokens in TOKENS if tokens < most), most]
        self._chunks: dict[tuple[int, int, bool], _Chunk] = {}
        self._pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> Tensor | None:
        """As `Model.forward`; overwritten by the next call. None for a batch that is too large."""
        count = sum(len(piece.tokens) for piece in slices)
        tokens = next((size for size in self._tokens if size >= count), None)
        sequences = next((size for size in SEQUENCES if size >= len(slices)), None)
        if tokens is None or sequences is None:
            return None
        logits = any(piece.want_logits for piece in slices)
        return self._chunk(tokens, sequences, logits).forward(slices)

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[int], None]) -> None:
        """Capture every graph, the largest first: the others use its memory."""
        for tokens in reversed(self._tokens):
            for sequences, logits in product(reversed(SEQUENCES), (True, False)):
                self._chunk(tokens, sequences, logits)
            progress(tokens)

    def _chunk(self, tokens: int, sequences: int, logits: bool) -> "_Chunk":
        key = tokens, sequences, logits
        if key not in self._chunks:
            self._chunks[key] = _Chunk(self._model, self._cache, *key, pool=self._pool)
        return self._chunks[key]


class _Chunk:
    """A batch of so many tokens, of so many sequences and one that is nobody's."""

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        tokens: int,
        sequences: int,
        logits: bool,
        *,
        pool: Any,
    ) -> None:
        self._model, self._cache, self._size = model, cache, model.page_size
        self._nowhere = len(cache.planes[0]) - 1
        pages = pages_for(model.context_length, self._size)
        self._batch = Batch.room(tokens, sequences + 1, pages, sequences * logits, model.device)
        self._write([])
        self._run: Callable[[], object] = self._compute
        if pool is not None:
            self._compute()
            self._run = capture(self._compute, pool)

    def _compute(self) -> None:
        self._logits = self._model.forward(self._batch, self._cache)

    def forward(self, slices: Sequence[SequenceSlice]) -> Tensor:
        self._write(slices)
        self._run()
        return self._logits[: sum(piece.want_logits for piece in slices)]

    def _write(self, slices: Sequence[SequenceSlice]) -> None:
        """Make it the batch of ``slices``, in order with what the device does: nobody waits."""
        batch, nowhere = self._batch, [self._nowhere]
        left = len(batch.tokens) - sum(len(piece.tokens) for piece in slices)
        rest = SequenceSlice([0] * left, 0, nowhere * max(1, pages_for(left, self._size)), False)
        none = SequenceSlice((), 0, nowhere, False)
        others = len(batch.lengths) - len(slices) - 1
        made = Batch.of([*slices, rest, *[none] * others])
        width, rows = made.page_table.shape[1], len(made.logit_rows)
        places = [getattr(batch, name) for name in _WRITTEN]
        places += [batch.page_table[:, :width], batch.logit_rows[:rows]]
        values = [getattr(made, name) for name in (*_WRITTEN, "page_table", "logit_rows")]
        for place, value in zip(places, values, strict=True):
            place.copy_(to_device(value.numpy(), place.device))
