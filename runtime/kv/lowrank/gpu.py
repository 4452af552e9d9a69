"""Launches of the Triton kernels of format `lowrank`."""

import math

import triton
from torch import Tensor

from runtime.attention.base import Batch
from runtime.attention.splits import MIN_TILES, Splits, decode_programs, merge_sizes
from runtime.config import ModelConfig
from runtime.kernels.alignment import VECTOR_ELEMENTS
from runtime.kv.lowrank.decode_kernel import latent_decode_kernel
from runtime.kv.lowrank.factors import LayerFactors
from runtime.kv.lowrank.kernels import append_latents_kernel, rebuild_kernel
from runtime.kv.rotation import PageRotation

_ROWS = 8
"""Query heads per program of `append_latents_kernel`."""
_COLUMNS = 256
"""Latents per store of `append_latents_kernel`."""
_DECODE_TILE, _REBUILD_TILE = 64, 128
"""Tokens of a tile."""
_WARPS, _STAGES = 8, 3
_CHUNK = 64
"""Latents per matmul."""
_DECODING = 1
"""Programs of `latent_decode_kernel` per multiprocessor: registers do not allow more at a time."""
_REBUILDING = 1
"""Programs of `rebuild_kernel` per multiprocessor and KV head."""
_LOG2_E = math.log2(math.e)


class LatentKernels:
    """Kernels for the latents of a model. CUDA graphs can contain their launches.

    Args:
        by_halves: whether the elements of q heads are in the order of
            `runtime.gemm.weights.by_halves`.
    """

    def __init__(
        self, config: ModelConfig, rotation: PageRotation, *, by_halves: bool = False
    ) -> None:
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._dim = config.head_dim
        self._rotation = rotation
        self._splits = Splits(self._heads, self._kv_heads, self._dim, _DECODING)
        self._by_halves = by_halves

    def append(
        self,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        planes: tuple[Tensor, ...],
        batch: Batch,
        factors: LayerFactors,
    ) -> Tensor:
        """See `LayerKV.append`."""
        q = qkv.new_empty(len(qkv), self._heads, self._dim)
        if not len(qkv):
            return q
        k_pages, v_pages = planes
        append_latents_kernel[(len(qkv), triton.cdiv(self._heads, _ROWS) + 1)](
            qkv, qkv.stride(0), *rope, batch.positions, batch.sequences, batch.starts,
            batch.lengths, batch.page_table, batch.page_table.stride(0), q, k_pages, v_pages,
            k_pages.stride(0), v_pages.stride(0), factors.k.rank, factors.v.rank,
            *_units(planes),
            HEADS=self._heads, DIM=self._dim, PAGE=k_pages.shape[2], ROWS=_ROWS,
            HALF=triton.next_power_of_2(self._dim // 2), BY_HALVES=self._by_halves,
            COLUMNS=_COLUMNS, num_warps=2,
        )  # fmt: skip
        return q

    def rebuild(
        self,
        planes: tuple[Tensor, ...],
        batch: Batch,
        factors: LayerFactors,
        k_pages: Tensor,
        v_pages: Tensor,
    ) -> None:
        """Write K and V of all tokens of a batch's sequences into ``k_pages`` and ``v_pages``.

        Args:
            planes: latents of K and V, `[page, 1, slot, width]`.
            k_pages, v_pages: bf16 `[page, kv_heads, slot, dim]`, with the pages of ``planes``.
        """
        sequences = len(batch.lengths)
        k_latents, v_latents = planes
        grid = decode_programs(batch.lengths.device, _REBUILDING), self._kv_heads
        rebuild_kernel[grid](
            k_latents, v_latents, k_latents.stride(0), v_latents.stride(0), batch.page_table,
            batch.page_table.stride(0), batch.lengths, sequences, factors.k.u, factors.v.u,
            factors.k.bias, factors.v.bias, *self._rotation.tables, k_pages, v_pages,
            *k_pages.stride()[:2], *_units(planes), DIM=self._dim, **self._widths,
            PAGE=k_latents.shape[2], BLOCK=_REBUILD_TILE, CHUNK=_CHUNK,
            SEQUENCES=triton.next_power_of_2(sequences), num_warps=_WARPS, num_stages=_STAGES,
        )  # fmt: skip

    def decode(
        self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch, factors: LayerFactors
    ) -> Tensor:
        """Return the attention of a decode batch over latents, `[n, heads * dim]`.

        Args:
            q: `[n, heads, dim]`, after RoPE, bf16 or fp32.
            planes: latents of K and V, `[page, 1, slot, width]`.
        """
        out = q.new_empty(len(q), self._heads * self._dim)
        if not len(q):
            return out
        group = self._heads // self._kv_heads
        splits = self._splits.of(len(q), q.device)
        k_latents, v_latents = planes
        cos, sin = self._rotation.tables
        latent_decode_kernel[(len(splits.acc),)](
            q, k_latents, v_latents, k_latents.stride(0), v_latents.stride(0), batch.page_table,
            batch.page_table.stride(0), batch.lengths, len(q), factors.k.u, factors.v.u,
            factors.k.bias, factors.v.bias, cos, sin, len(cos), splits.acc, splits.m, splits.l,
            splits.counters, out, _LOG2_E / math.sqrt(self._dim), *_units(planes),
            KV_HEADS=self._kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
            DIM=self._dim, **self._widths, PAGE=k_latents.shape[2], BLOCK=_DECODE_TILE,
            CHUNK=_CHUNK, CHUNKS=triton.cdiv(v_latents.shape[3], _CHUNK),
            SEQUENCES=len(splits.counters), MIN_TILES=MIN_TILES, **merge_sizes(group),
            num_warps=_WARPS, num_stages=_STAGES,
        )  # fmt: skip
        return out

    @property
    def _widths(self) -> dict[str, int]:
        """Powers of two that are at least the sizes of a half of a head and of a head."""
        return {
            "HALF": max(16, triton.next_power_of_2(self._dim // 2)),
            "DIMS": max(16, triton.next_power_of_2(self._dim)),
        }


def _units(planes: tuple[Tensor, ...]) -> tuple[int, int]:
    """Return the widths of the planes in units of `VECTOR_ELEMENTS`."""
    k_latents, v_latents = planes
    return k_latents.shape[3] // VECTOR_ELEMENTS, v_latents.shape[3] // VECTOR_ELEMENTS
