"""Launches the Triton kernels of encoders. The references are in `attention` and torch."""

import math

import torch
import triton
from torch import Tensor

from runtime.config import EncoderConfig
from runtime.encoder.batch import RaggedBatch
from runtime.encoder.kernels import add_norm_kernel, gelu_kernel, ragged_attention_kernel
from runtime.kernels.overlap import overlapped

_MIN_WIDTH = 16
"""Minimum of the dimensions of a matmul."""
_ROWS, _BLOCK = 4, 2048
"""Rows of one program of `add_norm_kernel`, and elements of one of `gelu_kernel`."""


QUERIES, KEYS, WARPS, STAGES = 64, 64, 4, 3
"""Queries of one program of `ragged_attention_kernel`, its keys per iteration, and Triton's launch
options; the fastest on an H200 with heads of 64."""


class TritonRaggedAttention:
    """Attention of a ragged batch in one launch, without padding; see `RaggedAttention`."""

    name = "triton"
    version = 1

    def __init__(self, config: EncoderConfig) -> None:
        self._heads, self._dim = config.num_heads, config.head_dim
        self._scale = math.log2(math.e) / math.sqrt(config.head_dim)
        self._width = max(triton.next_power_of_2(self._dim), _MIN_WIDTH)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        inputs = len(batch.lengths)
        if not inputs:
            return out
        ragged_attention_kernel[(len(q) // QUERIES + inputs, self._heads)](
            q, k, v, q.stride(0), k.stride(0), batch.starts, inputs, out, self._scale,
            HEADS=self._heads, DIM=self._dim, WIDTH=self._width, BLOCK_Q=QUERIES, BLOCK=KEYS,
            num_warps=WARPS, num_stages=STAGES, **overlapped(q.device),
        )  # fmt: skip
        return out


def add_norm(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Replace ``x`` `[n, d]` by the LayerNorm of ``x + added``, and return it.

    Args:
        weight, bias: `[d]`.
    """
    n, width = x.shape
    if n:
        add_norm_kernel[(triton.cdiv(n, _ROWS),)](
            x, added, weight, bias, n, width, eps,
            WIDTH=triton.next_power_of_2(width), ROWS=_ROWS, num_warps=4, **overlapped(x.device),
        )  # fmt: skip
    return x


def gelu(x: Tensor) -> Tensor:
    """Replace the elements of a contiguous tensor by their GELU, and return it."""
    if size := x.numel():
        gelu_kernel[(triton.cdiv(size, _BLOCK),)](
            x, size, BLOCK=_BLOCK, num_warps=4, **overlapped(x.device)
        )
    return x
