"""Prefill batches replayed as CUDA graphs, padded to a few sizes.

For a small batch, the host takes longer to launch the layers than the device takes to compute them.
Replaying a graph removes that delay. Graphs are captured for the sizes in `TOKEN_BUCKETS` and
`SEQUENCE_BUCKETS`, each with and without logits. A batch uses the smallest graph that is large
enough. The tensors of a graph's batch are static, and the host overwrites them. Padding tokens
write to the null page, the last page of the cache. Larger batches are not replayed, because their
launches take less time than their computation.
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

TOKEN_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Total tokens of the batches for which graphs are captured."""
SEQUENCE_BUCKETS = (1, 8)
"""Numbers of sequences of the batches for which graphs are captured."""
_COPIED_WHOLE = ("tokens", "positions", "starts", "lengths", "sequences")
"""Fields of `Batch` whose static tensors are overwritten completely for every batch."""


class PrefillReplay:
    """Replayed prefill of one model over one cache.

    Graphs are captured by `warm_up` or at first use. On the CPU the same padded batches are
    computed without graphs.

    Args:
        cache: KV pages. The last page must be the null page, which is allocated to no sequence.
        max_tokens: maximum number of tokens in a batch.
    """

    def __init__(self, model: Model, cache: PagedCache, max_tokens: int) -> None:
        self._model, self._cache = model, cache
        # Positions of padding tokens must be within the model's context, too.
        max_tokens = min(max_tokens, TOKEN_BUCKETS[-1], model.context_length)
        self._tokens = [*(size for size in TOKEN_BUCKETS if size < max_tokens), max_tokens]
        self._batches: dict[tuple[int, int, bool], _PaddedBatch] = {}
        self._pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> Tensor | None:
        """Compute a batch like `Model.forward`.

        Returns:
            Logits `[m, vocab]`, overwritten by the next call; None if no graph is large enough.
        """
        count = sum(len(piece.tokens) for piece in slices)
        tokens = next((size for size in self._tokens if size >= count), None)
        sequences = next((size for size in SEQUENCE_BUCKETS if size >= len(slices)), None)
        if tokens is None or sequences is None:
            return None
        logits = any(piece.want_logits for piece in slices)
        return self._batch(tokens, sequences, logits).forward(slices)

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[int], None]) -> None:
        """Capture all graphs, the largest first, so that the others reuse its memory.

        Args:
            progress: called with each size of `TOKEN_BUCKETS` after its graphs are captured.
        """
        for tokens in reversed(self._tokens):
            for sequences, logits in product(reversed(SEQUENCE_BUCKETS), (True, False)):
                self._batch(tokens, sequences, logits)
            progress(tokens)

    def _batch(self, tokens: int, sequences: int, logits: bool) -> "_PaddedBatch":
        key = tokens, sequences, logits
        if key not in self._batches:
            self._batches[key] = _PaddedBatch(self._model, self._cache, *key, pool=self._pool)
        return self._batches[key]


class _PaddedBatch:
    """A static batch of fixed size. Its padding tokens form one additional sequence."""

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
        self._model, self._cache, self._page_size = model, cache, model.page_size
        self._null_page = len(cache.planes[0]) - 1
        pages = pages_for(model.context_length, self._page_size)
        self._batch = Batch.zeros(tokens, sequences + 1, pages, sequences * logits, model.device)
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
        """Copy ``slices`` and padding into the static tensors, in stream order."""
        target, null_page = self._batch, [self._null_page]
        left = len(target.tokens) - sum(len(piece.tokens) for piece in slices)
        padding_pages = null_page * max(1, pages_for(left, self._page_size))
        padding = SequenceSlice([0] * left, 0, padding_pages, want_logits=False)
        unused = SequenceSlice((), 0, null_page, want_logits=False)
        num_unused = len(target.lengths) - len(slices) - 1
        source = Batch.of([*slices, padding, *[unused] * num_unused])
        width, rows = source.page_table.shape[1], len(source.logit_rows)
        targets = [getattr(target, name) for name in _COPIED_WHOLE]
        targets += [target.page_table[:, :width], target.logit_rows[:rows]]
        values = [getattr(source, name) for name in (*_COPIED_WHOLE, "page_table", "logit_rows")]
        for tensor, value in zip(targets, values, strict=True):
            tensor.copy_(to_device(value.numpy(), tensor.device))
