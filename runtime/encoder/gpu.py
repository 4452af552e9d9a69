"""Launches the Triton kernels of encoders. The references are in `attention` and torch."""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from runtime.config import EncoderConfig
from runtime.encoder.batch import RaggedBatch
from runtime.encoder.kernels.layers import (
    add_norm_kernel,
    embed_kernel,
    gelu_kernel,
    ragged_attention_kernel,
)
from runtime.kernels.overlap import overlapped

_MIN_WIDTH = 16
"""Minimum of the dimensions of a matmul."""
_ROWS, _BLOCK = 4, 2048
"""Rows of one program of `add_norm_kernel` and `embed_kernel`, elements of one of `gelu_kernel`."""


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
        return self.attend(q, k, v, batch, out)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: RaggedBatch,
        out: Tensor,
        q_bias: Tensor | None = None,
        v_bias: Tensor | None = None,
    ) -> Tensor:
        """Write the result to ``out``, and return it.

        Args:
            out: `[n, heads * dim]`, with any row stride. It may be ``q``.
            q_bias, v_bias: `[heads * dim]`, added to each query and value. The bias of keys would
                not change the result, because it adds the same to all scores of a query.
        """
        inputs = len(batch.lengths)
        if not inputs:
            return out
        ragged_attention_kernel[(len(q) // QUERIES + 1 + inputs, self._heads)](
            q, k, v, q.stride(0), k.stride(0), q_bias, v_bias, batch.starts, inputs, out,
            out.stride(0), self._scale,
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


@dataclass(frozen=True)
class FusedEmbeddings:
    """The sum of the embeddings of each token, its position and its type, and its LayerNorm.

    Attributes:
        tokens, positions, types: tables `[…, hidden]`, contiguous.
        weight, bias: of the LayerNorm, `[hidden]`.
    """

    tokens: Tensor
    positions: Tensor
    types: Tensor
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Return `[n, hidden]`."""
        n, width = len(batch.tokens), self.tokens.shape[1]
        out = self.tokens.new_empty(n, width)
        if n:
            embed_kernel[(triton.cdiv(n, _ROWS),)](
                batch.tokens, batch.positions, batch.types, self.tokens, self.positions,
                self.types, self.weight, self.bias, out, n, width, self.eps,
                WIDTH=triton.next_power_of_2(width), ROWS=_ROWS, num_warps=4,
            )  # fmt: skip
        return out


def gelu(x: Tensor) -> Tensor:
    """Replace the elements of a contiguous tensor by their GELU, and return it."""
    if size := x.numel():
        gelu_kernel[(triton.cdiv(size, _BLOCK),)](
            x, size, BLOCK=_BLOCK, num_warps=4, **overlapped(x.device)
        )
    return x
