"""How KV is stored, sent and attended: the interface that every KV format has."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.config import ModelConfig


@dataclass(frozen=True)
class Plane:
    """One tensor of a layer over all pages: ``[page, *shape]`` of ``dtype``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class KVFormat(Protocol):
    """A representation of keys and values in pages.

    A prefill worker and a decode worker work together only if name, version and ``artifact_hash``
    (of calibration results; empty where a format has none) agree.
    """

    name: str
    version: int
    lossless: bool
    artifact_hash: str

    @property
    def kernels(self) -> str:
        """Name and version of what computes it: part of the model's kernel plan."""
        ...

    def planes(self, config: ModelConfig, page_size: int) -> tuple[Plane, ...]:
        """The planes of one layer, in the order in which they are kept and sent."""
        ...

    def bytes_per_token(self, config: ModelConfig) -> int:
        """Bytes that one token takes in all layers."""
        ...

    def append(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        """Write the tokens of a batch, one or many of each sequence, into a layer's planes.

        Args:
            qkv: `[n, (heads + 2 kv_heads) * dim]`, before RoPE.
            rope: cosines and sines, fp32 `[context, dim / 2]` each.

        Returns:
            q as `attend` wants it, `[n, heads, dim]`.
        """
        ...

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """Causal attention of the tokens of a batch: `[n, heads * dim]`."""
        ...

    def decode_dense(
        self, planes: tuple[Tensor, ...], pages: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """K and V of one sequence as attention sees them: `[kv_heads, length, dim]` fp32 each."""
        ...
