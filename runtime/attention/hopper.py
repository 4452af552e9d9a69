"""Launches the prefill kernel for Hopper GPUs."""

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from runtime.attention.base import Batch
from runtime.attention.kernels.prefill_hopper import BOX, KEYS, QUERIES, prefill_kernel

_CAPABILITY = (9, 0)
_SWIZZLED_ROWS = 8
"""Rows of the swizzle pattern of shared memory, and the minimum page size in tokens."""
_SLOTS = 4
"""Number of tiles (of keys or of values) in shared memory, 32 KiB each with 128 dimensions."""


def supports(q: Tensor, k_pages: Tensor) -> bool:
    """Return whether `prefill` can attend with bf16 queries to these pages on their device."""
    page, dim = k_pages.shape[2:]
    return (
        q.is_cuda
        and q.dtype == torch.bfloat16
        and dim in (BOX.value, 2 * BOX.value)
        and page >= _SWIZZLED_ROWS
        and KEYS.value % page == 0
        and torch.cuda.get_device_capability(q.device) == _CAPABILITY
    )


def prefill(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, out: Tensor, scale: float
) -> None:
    """Compute causal attention of the batch's tokens.

    Args:
        q: bf16 `[n, heads, dim]`.
        k_pages, v_pages: bf16 `[pages, kv_heads, page_size, dim]`, of equal strides, which are
            multiples of ``dim``.
        out: bf16 `[n, heads * dim]`, written.
        scale: log2(e) / sqrt(dim).
    """
    heads, dim = q.shape[1:]
    sequences = len(batch.lengths)
    prefill_kernel[(heads, len(q) // QUERIES.value + sequences)](
        q, _rows(k_pages), _rows(v_pages), k_pages.stride(0) // dim, k_pages.stride(1) // dim,
        batch.page_table, batch.page_table.stride(0), batch.starts, batch.lengths, sequences, out,
        scale,
        HEADS=heads, KV_HEADS=k_pages.shape[1], DIM=dim, PAGE=k_pages.shape[2], SLOTS=_SLOTS,
        num_warps=4,
    )  # fmt: skip


def _rows(pages: Tensor) -> TensorDescriptor:
    """Return a descriptor of pages as rows of ``dim`` elements, in boxes of a page."""
    count, heads, size, dim = pages.shape
    last = (count - 1) * pages.stride(0) + (heads - 1) * pages.stride(1)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(pages, [last // dim + size, dim], [dim, 1], [size, BOX.value], layout)
