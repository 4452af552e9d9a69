"""Prefill attention on projected queries and keys: the reference, and launches of the kernels."""

import math

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.attention.reference import ReferenceAttention
from runtime.config import ModelConfig
from runtime.kv.calibration.projection import project_pages

_QUERIES = _KEYS = 128
_WARPS = 8


def attend_projected(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, k_basis: Tensor, batch: Batch
) -> Tensor:
    """Attend over full-precision pages whose keys are projected to a basis; this is the reference.

    Args:
        q, k_pages, v_pages, batch: see `DenseAttention.attend`.
        k_basis: fp32 `[kv_heads, dim, k_width]`.
    """
    page_size = k_pages.shape[2]
    used = torch.cat(
        [
            row[: -(-int(length) // page_size)]
            for row, length in zip(batch.page_table, batch.lengths, strict=True)
        ]
    ).long()
    latents = project_pages(k_pages[used].float(), k_basis).to(k_pages.dtype)
    keys = torch.zeros_like(k_pages, dtype=torch.float32)
    keys[used] = project_pages(latents.float(), k_basis.mT)
    return ReferenceAttention().attend(q, keys, v_pages, batch)


class LatentPrefill:
    """Kernels of prefill attention on projected queries and keys.

    The latents of keys take at most as much memory as K of one layer. All layers share it.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._heads = config.num_heads
        self._dim = config.head_dim
        self._memory: Tensor | None = None

    def attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        basis: Tensor,
        ranks: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Project the keys of all pages of each sequence, then attend; see `attend_projected`.

        Args:
            basis: bf16 `[2, kv_heads, dim, k_width]`.
            ranks: int32, see `runtime.kv.fdc.kernels`.
        """
        from runtime.kv.fdc import prefill_kernels  # optional: Triton

        out = q.new_empty(len(q), self._heads * self._dim)
        if not len(q):
            return out
        kv_heads, width = basis.shape[1], basis.shape[3]
        table = batch.page_table
        sequences = len(batch.lengths)
        page = k_pages.shape[2]
        latents = self._latents(k_pages, width)
        sizes = {"KV_HEADS": kv_heads, "DIM": self._dim, "PAGE": page, "K_WIDTH": width}
        prefill_kernels.project_keys_kernel[(sequences, table.shape[1], kv_heads)](
            k_pages, *k_pages.stride()[:2], table, table.stride(0), batch.lengths, basis, ranks,
            latents, **sizes,
        )  # fmt: skip
        keys = _KEYS if self._dim <= _KEYS else _KEYS // 2
        prefill_kernels.latent_prefill_kernel[(len(q) // _QUERIES + sequences, self._heads)](
            q, latents, basis, ranks, v_pages, *v_pages.stride()[:2], table, table.stride(0),
            batch.starts, batch.lengths, sequences, out, math.log2(math.e) / math.sqrt(self._dim),
            HEADS=self._heads, BLOCK_Q=_QUERIES, BLOCK=keys, num_warps=_WARPS, num_stages=2,
            **sizes,
        )  # fmt: skip
        return out

    def _latents(self, k_pages: Tensor, width: int) -> Tensor:
        """Return `[page, kv_heads, page_size, width]`, a view of the memory that layers share."""
        if self._memory is None or self._memory.numel() < k_pages.numel():
            self._memory = torch.empty(k_pages.numel(), dtype=k_pages.dtype, device=k_pages.device)
        pages, kv_heads, page, _ = k_pages.shape
        shape = pages, kv_heads, page, width
        return self._memory[: math.prod(shape)].view(shape)
