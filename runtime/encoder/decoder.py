"""Decoders as embedders, such as Qwen3-Embedding: causal, usually with last-token pooling."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from runtime.attention.base import Batch, HiddenLog, SequenceSlice
from runtime.checkpoint.weights import Checkpoint
from runtime.encoder.batch import RaggedBatch, in_parts
from runtime.gemm.model import build_fastest_model
from runtime.kv.cache import PagedCache
from runtime.pages.plan import PageCount

_PAGE_SIZE = 16
_PASS_PAGES = 1024
"""Maximum pages of a pass over several inputs. Short inputs also need whole pages."""


class DecoderBackbone:
    """Hidden states of a decoder, computed by the layers and the attention that serve prompts.

    As in serving, K and V are rounded to bf16. The pages are only used during a call; they are
    allocated anew when a pass needs more of them. A pass has at most `_PASS_PAGES` pages, or one
    input.

    Attributes:
        name: identity of the attention kernels.
    """

    name = "paged"

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._model = build_fastest_model(
            checkpoint, device=device, dtype=dtype, page_size=_PAGE_SIZE
        )
        self._pages = 0
        self._cache: PagedCache | None = None

    def __call__(self, batch: RaggedBatch) -> Tensor:
        tokens, starts = batch.tokens.tolist(), batch.starts.tolist()
        pages = [-(-length // _PAGE_SIZE) for length in batch.lengths]
        return torch.cat(
            [
                self._pass(tokens, starts[part.start : part.stop + 1], batch.tokens.device)
                for part in in_parts(pages, _PASS_PAGES)
            ]
        )

    def _pass(self, tokens: list[int], starts: list[int], device: torch.device) -> Tensor:
        """Return the hidden states of the inputs that begin at ``starts``, but for the last one."""
        slices, used = [], 0
        for start, end in pairwise(starts):
            pages = range(used, used + -(-(end - start) // _PAGE_SIZE))
            slices.append(SequenceSlice(tokens[start:end], 0, pages, want_logits=False))
            used = pages.stop
        log = HiddenLog(torch.arange(starts[-1] - starts[0], device=device))
        paged = replace(Batch.of(slices, device), hidden=log)
        self._model.forward(paged, self._cache_of(used))
        return log.hidden[0]

    def _cache_of(self, pages: int) -> PagedCache:
        if self._cache is None or pages > self._pages:
            self._cache = None  # freed before more pages are allocated
            self._cache, self._pages = self._model.new_cache(PageCount(pages)), pages
        return self._cache
