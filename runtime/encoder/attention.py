"""Bidirectional attention over ragged batches: interface, reference and CPU implementation."""

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runtime.config import EncoderConfig
from runtime.encoder import loops
from runtime.encoder.batch import RaggedBatch
from runtime.errors import RuntimeFault


class RaggedAttention(Protocol):
    """Attention of every token to all tokens of its input.

    Attributes:
        name, version: identity of the kernels.
    """

    name: str
    version: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> Tensor:
        """Compute ``softmax(q·k / √dim)·v`` for each head and input.

        Args:
            q, k, v: `[n, heads * dim]`, heads concatenated, with any row stride.
            batch: ``starts`` (int32 `[s + 1]`, on the device) and ``longest`` delimit the inputs.

        Returns:
            `[n, heads * dim]`, contiguous, in the dtype of ``q``.
        """
        ...


def by_head(x: Tensor, dim: int) -> Tensor:
    """Return a view of `[n, heads * dim]` as `[n, heads, dim]`."""
    return x.view(len(x), x.shape[1] // dim, dim)


class ReferenceAttention:
    """Attention of one input after another, with torch on any device."""

    name = "reference"
    version = 1

    def __init__(self, config: EncoderConfig) -> None:
        self._dim = config.head_dim

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> Tensor:
        if not batch.lengths:
            return torch.empty_like(q)
        split = (torch.split(x, list(batch.lengths)) for x in (q, k, v))
        return torch.cat([self._attend(*each) for each in zip(*split, strict=True)])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (by_head(x, self._dim).transpose(0, 1) for x in (q, k, v))  # [heads, n, dim]
        return functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)


class CompiledAttention:
    """Attention on the CPU with compiled loops, in fp32; see `loops.py` for its guarantees."""

    name = "compiled"
    version = 1

    def __init__(self, config: EncoderConfig) -> None:
        self._dim = config.head_dim
        self._scale = np.float32(1.0 / math.sqrt(config.head_dim))
        q, k, v = torch.empty(0, 3 * config.hidden_size).chunk(3, dim=1)
        self(q, k, v, RaggedBatch.of([]))  # compiles the loops

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> Tensor:
        out = torch.empty(q.shape, dtype=torch.float32)
        queries, keys, values, written = (
            by_head(x.float(), self._dim).numpy() for x in (q, k, v, out)
        )
        loops.attend(queries, keys, values, batch.starts.numpy(), self._scale, written)
        return out.to(q.dtype)


def attention_of(
    name: str, config: EncoderConfig, device: torch.device, dtype: torch.dtype
) -> RaggedAttention:
    """Return the attention of a backend; ``auto`` is the fastest for the device and dtype.

    Raises:
        RuntimeFault: there is no such backend, or it does not support the device.
    """
    if name == "auto":
        triton = device.type == "cuda" and dtype == torch.bfloat16
        name = "compiled" if device.type == "cpu" else "triton" if triton else "reference"
    if name == "reference":
        return ReferenceAttention(config)
    if name == "compiled" and device.type == "cpu":
        return CompiledAttention(config)
    if name == "triton" and device.type == "cuda":
        from runtime.encoder.gpu import TritonRaggedAttention  # optional: Triton

        return TritonRaggedAttention(config)
    raise RuntimeFault(f"encoder backend {name!r} is not known on {device.type}")
