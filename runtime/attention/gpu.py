"""Attention by Triton kernels: decode split over the length, prefill in blocks of queries."""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from runtime.attention.base import Batch
from runtime.attention.kernels.decode import decode_kernel
from runtime.attention.kernels.prefill import factored_prefill_kernel, prefill_kernel
from runtime.attention.kernels.rope_write import turn_and_write_kernel

_ROWS = 8
"""Heads that a program of `turn_and_write_kernel` turns."""
_TOKENS = 64
"""Keys of a block in decode."""
_QUERIES = _KEYS = 128
"""Queries and keys of a block in prefill; half as many queries of few, half as many keys of wider
heads."""
_PROGRAMS = 528
"""Decode aims at so many: four to an SM of an H200."""
_FILLED = 66
"""Programs of prefill, from which on there are enough: for half of an H200's SMs."""
_MOST_SPLITS = 64
_LOG2_E = math.log2(math.e)


@dataclass
class _Space:
    """What decode's programs tell one another, of some sizes; a CUDA graph knows it by its address.

    ``arrived`` int32 is zeros between launches.
    """

    sums: Tensor
    peaks: Tensor
    totals: Tensor
    arrived: Tensor

    @classmethod
    def of(
        cls, sequences: int, heads: int, dim: int, splits: int, device: torch.device
    ) -> "_Space":
        parts = sequences * heads * splits
        sums = torch.empty(parts * dim, dtype=torch.float32, device=device)
        peaks, totals = torch.empty(2, parts, dtype=torch.float32, device=device)
        arrived = torch.zeros(sequences * heads, dtype=torch.int32, device=device)
        return cls(sums, peaks, totals, arrived)


class TritonAttention:
    """See `runtime.attention.base.DenseAttention`. Queries are bf16 or fp32, K and V bf16.

    With ``by_halves``, rows of heads come in the order of `runtime.gemm.weights.by_halves`.
    """

    name = "triton"
    version = 3

    def __init__(self, heads: int, kv_heads: int, dim: int, *, by_halves: bool = False) -> None:
        self._by_halves = by_halves
        self._heads, self._kv_heads, self._dim = heads, kv_heads, dim
        self._scale = _LOG2_E / math.sqrt(dim)
        self._width = max(16, triton.next_power_of_2(dim))
        self._spaces: dict[tuple[int, int], _Space] = {}

    def write(
        self,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
    ) -> Tensor:
        q = qkv.new_empty(len(qkv), self._heads, self._dim)
        self._turn(qkv, rope, q, k_pages, v_pages, batch, self._heads)
        return q

    def write_kv(
        self,
        kv: Tensor,
        rope: tuple[Tensor, Tensor],
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
    ) -> None:
        """As `write`, of k and v alone: `[n, 2 kv_heads * dim]`."""
        self._turn(kv, rope, kv, k_pages, v_pages, batch, 0)

    def _turn(
        self,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
        query_heads: int,
    ) -> None:
        if not len(qkv):
            return
        heads = query_heads + 2 * self._kv_heads
        turn_and_write_kernel[(len(qkv), triton.cdiv(heads, _ROWS))](
            qkv, *rope, batch.positions, batch.sequences, batch.page_table,
            batch.page_table.stride(0), q, k_pages, v_pages, *k_pages.stride()[:2],
            HEADS=query_heads, KV_HEADS=self._kv_heads, DIM=self._dim, PAGE=k_pages.shape[2],
            ROWS=_ROWS, HALF=triton.next_power_of_2(self._dim // 2), BY_HALVES=self._by_halves,
            num_warps=2,
        )  # fmt: skip

    def attend_factored(
        self,
        inner: Tensor,
        u: Tensor,
        biases: Tensor | None,
        rope: tuple[Tensor, Tensor],
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
    ) -> Tensor:
        """As `attend`, of queries as their factors, before RoPE: ``inner`` bf16 `[n, …]` begins
        with V_q x, ``u`` bf16 `[heads * dim, rank]` is U_q. For several tokens of a sequence, and
        heads of a power of two."""
        out = inner.new_empty(len(inner), self._heads * self._dim)
        sequences = len(batch.lengths)
        queries, warps = self._queries(len(inner))
        blocks = len(inner) // queries + sequences
        factored_prefill_kernel[(blocks, self._heads)](
            inner, inner.stride(0) // 8, u, u.stride(0) // 8, u.shape[1] // 8, biases, *rope,
            k_pages, v_pages, *k_pages.stride()[:2], batch.page_table, batch.page_table.stride(0),
            batch.starts, batch.lengths, sequences, out, self._scale,
            HEADS=self._heads, KV_HEADS=self._kv_heads, DIM=self._dim, PAGE=k_pages.shape[2],
            BLOCK_Q=queries, BLOCK=_KEYS, BLOCK_R=64, BIAS=biases is not None, num_warps=warps,
            num_stages=2,
        )  # fmt: skip
        return out

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> Tensor:
        out = q.new_empty(len(q), self._heads * self._dim)
        if not len(q):
            return out
        if batch.single:
            self._decode(q, k_pages, v_pages, batch, out)
        else:
            self._prefill(q, k_pages, v_pages, batch, out)
        return out

    def splits(self, sequences: int) -> int:
        """Parts of a sequence's length, a power of two; the same for a batch of any lengths."""
        wanted = _PROGRAMS // (sequences * self._kv_heads)
        return min(_MOST_SPLITS, max(1, 1 << max(0, wanted).bit_length() - 1)) if wanted else 1

    def _decode(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, out: Tensor
    ) -> None:
        sequences, group = len(q), self._heads // self._kv_heads
        splits = self.splits(sequences)
        key = (sequences, splits) if splits > 1 else (0, 1)  # who is alone tells nobody
        if key not in self._spaces:
            self._spaces[key] = _Space.of(key[0], self._heads, self._dim, splits, q.device)
        space = self._spaces[key]
        decode_kernel[(sequences, self._kv_heads, splits)](
            q, k_pages, v_pages, *k_pages.stride()[:2], batch.page_table,
            batch.page_table.stride(0), batch.lengths, space.sums, space.peaks, space.totals,
            space.arrived, out, self._scale,
            KV_HEADS=self._kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
            DIM=self._dim, WIDTH=self._width, PAGE=k_pages.shape[2], BLOCK=_TOKENS, SPLITS=splits,
            num_warps=2, num_stages=4,
        )  # fmt: skip

    def _prefill(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, out: Tensor
    ) -> None:
        sequences = len(batch.lengths)
        queries, warps = self._queries(len(q))
        blocks = len(q) // queries + sequences
        prefill_kernel[(blocks, self._heads)](
            q, k_pages, v_pages, *k_pages.stride()[:2], batch.page_table,
            batch.page_table.stride(0), batch.starts, batch.lengths, sequences, out, self._scale,
            HEADS=self._heads, KV_HEADS=self._kv_heads, DIM=self._dim, WIDTH=self._width,
            PAGE=k_pages.shape[2], BLOCK_Q=queries,
            BLOCK=_KEYS if self._width <= _KEYS else _KEYS // 2, num_warps=warps, num_stages=2,
        )  # fmt: skip

    def _queries(self, tokens: int) -> tuple[int, int]:
        """Of a program, and its warps: fewer where programs are."""
        few = tokens // _QUERIES * self._heads < _FILLED
        return (_QUERIES // 2, 4) if few else (_QUERIES, 8)
