"""Attention on the CPU from compiled loops, in fp32: see `loops.py` for its guarantee."""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from runtime.attention import loops
from runtime.attention.base import Batch

_PROMPT_LANES = 64
_DECODE_LANES = (4, 8)

_attend_with = lru_cache(loops.attend_with)


class CompiledAttention:
    """See `runtime.attention.base.DenseAttention`. ``head_dim`` is a multiple of 4, q is fp32."""

    name = "compiled"
    version = 1

    def __init__(self, heads: int, kv_heads: int, dim: int) -> None:
        group = heads // kv_heads
        decode_lanes = next((width for width in _DECODE_LANES if width >= group), _PROMPT_LANES)
        self._decode = _attend_with(decode_lanes)
        self._prefill = _attend_with(_PROMPT_LANES)
        self._compile(heads, kv_heads, dim)

    def _compile(self, heads: int, kv_heads: int, dim: int) -> None:
        """Run everything over one sequence without tokens, so that no request waits for it."""
        none = torch.zeros(1, dtype=torch.int32)
        batch = Batch(none[1:].long(), none[1:].long(), none[None], none.repeat(2), none, none)
        pages = torch.empty(1, kv_heads, 1, dim, dtype=torch.bfloat16)
        rope = (torch.empty(1, dim // 2), torch.empty(1, dim // 2))
        q = self.write(torch.empty(0, (heads + 2 * kv_heads) * dim), rope, pages, pages, batch)
        for attend in (self._decode, self._prefill):
            self._attend(attend, q, pages, pages, batch)

    def write(
        self,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
    ) -> Tensor:
        kv_heads, _, dim = k_pages.shape[1:]
        by_head = qkv.view(len(qkv), qkv.shape[1] // dim, dim)
        cos, sin = rope
        q = torch.empty(len(qkv), by_head.shape[1] - 2 * kv_heads, dim)
        loops.write(
            by_head.numpy(),
            cos.numpy(),
            sin.numpy(),
            _patterns(k_pages),
            _patterns(v_pages),
            *batch.tables,
            q.numpy(),
        )
        return q

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> Tensor:
        decoding = len(batch.lengths) == len(q)
        return self._attend(self._decode if decoding else self._prefill, q, k_pages, v_pages, batch)

    def _attend(
        self,
        attend: Callable[..., None],
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
    ) -> Tensor:
        out = torch.empty_like(q)
        attend(
            q.numpy(),
            _patterns(k_pages),
            _patterns(v_pages),
            *batch.tables,
            np.float32(1.0 / math.sqrt(q.shape[-1])),
            out.numpy(),
        )
        return out.flatten(1)


@lru_cache(maxsize=4096)
def _patterns(pages: Tensor) -> loops.Patterns:
    """The pages as a loop takes them. They are the same few tensors in every step."""
    patterns: loops.Patterns = pages.view(torch.uint16).numpy()
    return patterns
