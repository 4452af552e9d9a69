"""Triton attention: decode balanced over programs, prefill in blocks of queries."""

import math
from dataclasses import dataclass

import triton
from torch import Tensor

from runtime.attention import hopper
from runtime.attention.base import Batch
from runtime.attention.kernels.decode import decode_kernel
from runtime.attention.kernels.prefill import factored_prefill_kernel, prefill_kernel
from runtime.attention.kernels.rope_write import rope_write_kernel
from runtime.attention.splits import MIN_TILES, Splits, merge_sizes
from runtime.kernels.alignment import VECTOR_ELEMENTS
from runtime.kernels.overlap import overlapped

_ROWS = 8
"""Heads per program of `rope_write_kernel`."""
_TILE = 64
"""Keys of a tile in decode."""
_QUERIES = _KEYS = 128
"""Queries per program and keys per iteration in prefill. Small batches use half as many queries;
heads wider than 128 use half as many keys."""
_MIN_PREFILL_PROGRAMS = 66
"""Prefill programs that occupy half of an H200's multiprocessors. A batch with fewer programs uses
smaller blocks of queries."""
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class HeadNorms:
    """Weights of the RMSNorm that is applied to query and key heads before RoPE.

    Attributes:
        q, k: fp32 `[dim]`, in the model's order of dimensions.
    """

    q: Tensor
    k: Tensor
    eps: float


class TritonAttention:
    """Implements `runtime.attention.base.DenseAttention` for bf16 or fp32 queries.

    Args:
        by_halves: whether the elements of q, k and v heads are in the order of
            `runtime.gemm.weights.by_halves`.
    """

    name = "triton"
    version = 5

    def __init__(self, heads: int, kv_heads: int, dim: int, *, by_halves: bool = False) -> None:
        self._by_halves = by_halves
        self._heads = heads
        self._kv_heads = kv_heads
        self._dim = dim
        self._scale = _LOG2_E / math.sqrt(dim)
        self._width = max(16, triton.next_power_of_2(dim))
        self._splits = Splits(heads, kv_heads, dim)

    def write(
        self,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """See `DenseAttention.write`. ``norms`` is applied to query and key heads before RoPE."""
        q = qkv.new_empty(len(qkv), self._heads, self._dim)
        self._rope_write(qkv, rope, q, k_pages, v_pages, batch, self._heads, norms)
        return q

    def write_kv(
        self,
        kv: Tensor,
        rope: tuple[Tensor, Tensor],
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
    ) -> None:
        """Write k and v into pages, as `write` does. ``kv`` is `[n, 2 kv_heads * dim]`."""
        self._rope_write(kv, rope, kv, k_pages, v_pages, batch, 0, None)

    def _rope_write(
        self,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
        query_heads: int,
        norms: HeadNorms | None,
    ) -> None:
        if not len(qkv):
            return
        heads = query_heads + 2 * self._kv_heads
        q_norm, k_norm, eps = (None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
        rope_write_kernel[(len(qkv), triton.cdiv(heads, _ROWS))](
            qkv, *rope, batch.positions, batch.sequences, batch.starts, batch.lengths,
            batch.page_table, batch.page_table.stride(0), q, k_pages, v_pages,
            *k_pages.stride()[:2], q_norm, k_norm,
            HEADS=query_heads, KV_HEADS=self._kv_heads, DIM=self._dim, PAGE=k_pages.shape[2],
            ROWS=_ROWS, HALF=triton.next_power_of_2(self._dim // 2), BY_HALVES=self._by_halves,
            NORM=norms is not None, EPS=eps, num_warps=2, **overlapped(qkv.device),
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
        """Compute prefill attention with queries computed from their factors inside the kernel.

        The head dimension must be a power of two. K and V of the batch must be in the pages
        already, and no token may be evicted: positions follow from the lengths.

        Args:
            inner: bf16 `[n, …]`; its first ``rank`` columns are V_q x.
            u: bf16 `[heads * dim, rank]`, U_q, with rows in the order of `by_halves`.
            biases: fp32 `[heads * dim]`, in the same order.

        Returns:
            bf16 `[n, heads * dim]`.
        """
        out = inner.new_empty(len(inner), self._heads * self._dim)
        sequences = len(batch.lengths)
        queries, warps = self._query_block(len(inner))
        blocks = len(inner) // queries + sequences
        factored_prefill_kernel[(blocks, self._heads)](
            inner, inner.stride(0) // VECTOR_ELEMENTS, u, u.stride(0) // VECTOR_ELEMENTS,
            u.shape[1] // VECTOR_ELEMENTS, biases, *rope,
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

    def _decode(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, out: Tensor
    ) -> None:
        sequences = len(q)
        group = self._heads // self._kv_heads
        splits = self._splits.of(sequences, q.device)
        decode_kernel[(len(splits.acc),)](
            q, k_pages, v_pages, *k_pages.stride()[:2], batch.page_table,
            batch.page_table.stride(0), batch.lengths, sequences, splits.acc, splits.m, splits.l,
            splits.counters, out, self._scale,
            KV_HEADS=self._kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
            DIM=self._dim, WIDTH=self._width, PAGE=k_pages.shape[2], BLOCK=_TILE,
            SEQUENCES=len(splits.counters), MIN_TILES=MIN_TILES, **merge_sizes(group),
            num_warps=2, num_stages=3, **overlapped(q.device),
        )  # fmt: skip

    def _prefill(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, out: Tensor
    ) -> None:
        if hopper.supports(q, k_pages):
            hopper.prefill(q, k_pages, v_pages, batch, out, self._scale)
            return
        sequences = len(batch.lengths)
        queries, warps = self._query_block(len(q))
        blocks = len(q) // queries + sequences
        prefill_kernel[(blocks, self._heads)](
            q, k_pages, v_pages, *k_pages.stride()[:2], batch.page_table,
            batch.page_table.stride(0), batch.starts, batch.lengths, sequences, out, self._scale,
            HEADS=self._heads, KV_HEADS=self._kv_heads, DIM=self._dim, WIDTH=self._width,
            PAGE=k_pages.shape[2], BLOCK_Q=queries,
            BLOCK=_KEYS if self._width <= _KEYS else _KEYS // 2, num_warps=warps, num_stages=2,
        )  # fmt: skip

    def _query_block(self, tokens: int) -> tuple[int, int]:
        """Return the number of queries and of warps per prefill program."""
        few = tokens // _QUERIES * self._heads < _MIN_PREFILL_PROGRAMS
        return (_QUERIES // 2, 4) if few else (_QUERIES, 8)
