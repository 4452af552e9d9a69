"""Launches of the Triton kernels of format `lowrank`."""

import triton
from torch import Tensor

from runtime.attention.base import Batch
from runtime.attention.splits import decode_programs
from runtime.config import ModelConfig
from runtime.kv.lowrank.factors import LayerFactors
from runtime.kv.lowrank.kernels import append_latents_kernel, rebuild_kernel
from runtime.kv.rotation import PageRotation

_ROWS = 8
"""Query heads per program of `append_latents_kernel`."""
_COLUMNS = 256
"""Latents per store of `append_latents_kernel`."""
_TILE = 64
"""Tokens of a tile."""
_CHUNK = 64
"""Latents per matmul."""
_REBUILDING = 2
"""Programs of `rebuild_kernel` per multiprocessor and KV head."""


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
            HEADS=self._heads, DIM=self._dim, PAGE=k_pages.shape[2], ROWS=_ROWS,
            HALF=triton.next_power_of_2(self._dim // 2), BY_HALVES=self._by_halves,
            K_WIDTH=k_pages.shape[3], V_WIDTH=v_pages.shape[3], COLUMNS=_COLUMNS, num_warps=2,
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
            *k_pages.stride()[:2], DIM=self._dim, **self._widths(planes),
            PAGE=k_latents.shape[2], BLOCK=_TILE, CHUNK=_CHUNK,
            SEQUENCES=triton.next_power_of_2(sequences), num_warps=4, num_stages=3,
        )  # fmt: skip

    def _widths(self, planes: tuple[Tensor, ...]) -> dict[str, int]:
        """Return the sizes of heads and latents, by the names of the kernels' constants."""
        k_latents, v_latents = planes
        return {
            "HALF": max(16, triton.next_power_of_2(self._dim // 2)),
            "DIMS": max(16, triton.next_power_of_2(self._dim)),
            "K_WIDTH": k_latents.shape[3],
            "V_WIDTH": v_latents.shape[3],
        }
