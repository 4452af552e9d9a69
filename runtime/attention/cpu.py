"""fp32 attention on the CPU with compiled loops; see `loops.py` for its guarantees."""

import math

import numpy as np
import torch
from torch import Tensor

from runtime.attention import loops
from runtime.attention.base import Batch
from runtime.cpu.jit import Halves
from runtime.cpu.tiles import LANES

_ALL = 1 << 31
"""Window of layers without a sliding window: more tokens than a sequence can have."""


class CompiledAttention:
    """CPU backend of `runtime.attention.base.DenseAttention`; q is fp32.

    Args:
        window: number of last tokens that a token attends to, itself included; None: all.
    """

    name = "compiled"
    version = 1

    def __init__(self, heads: int, kv_heads: int, dim: int, window: int | None = None) -> None:
        self._window = _ALL if window is None else window
        self._scale = np.float32(1.0 / math.sqrt(dim))
        self._compile(heads, kv_heads, dim)

    def _compile(self, heads: int, kv_heads: int, dim: int) -> None:
        """Compile all loops by running them on an empty batch."""
        batch = Batch.zeros(0, 0, 0, 0, "cpu")
        pages = torch.empty(0, kv_heads, LANES, dim, dtype=torch.bfloat16)
        rope = (torch.empty(0, dim // 2), torch.empty(0, dim // 2))
        q = self.write(torch.empty(0, (heads + 2 * kv_heads) * dim), rope, pages, pages, batch)
        for one_each in (False, True):
            self._attend(q, pages, pages, batch, one_each=one_each)

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
            batch.positions.numpy(),
            *batch.tables,
            q.numpy(),
        )
        return q

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> Tensor:
        one_each = batch.single and LANES % k_pages.shape[2] == 0
        return self._attend(q, k_pages, v_pages, batch, one_each=one_each)

    def _attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, *, one_each: bool
    ) -> Tensor:
        out = torch.empty_like(q)
        page_table, starts, lengths = batch.tables
        inputs = q.numpy(), _patterns(k_pages), _patterns(v_pages), page_table
        rest = lengths, self._scale, self._window, out.numpy()
        if one_each:
            loops.attend_one(*inputs, *rest)
        else:
            loops.attend(*inputs, starts, *rest)
        return out.flatten(1)


def _patterns(pages: Tensor) -> Halves:
    """View bf16 pages as u16 patterns, without a copy."""
    patterns: Halves = pages.view(torch.uint16).numpy()
    return patterns
