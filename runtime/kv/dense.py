"""KV format `dense`: K (after RoPE) and V as bf16; not compressed."""

from typing import Self

import torch
from torch import Tensor

from runtime.attention import dense_attention
from runtime.attention.base import Batch, DenseAttention
from runtime.attention.reference import ReferenceAttention
from runtime.config import ModelConfig
from runtime.kv.format import Plane


class DenseLayer:
    """One layer of format `dense`; a `LayerKV` whose planes are K and V."""

    def __init__(self, attention: DenseAttention) -> None:
        self._attention = attention

    def append(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        k_pages, v_pages = planes
        return self._attention.write(qkv, rope, k_pages, v_pages, batch)

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
        k_pages, v_pages = planes
        return self._attention.attend(q, k_pages, v_pages, batch)


class DenseFormat:
    """Implements `runtime.kv.format.KVFormat`. Planes are bf16 for any dtype of the model."""

    name = "dense"
    version = 1
    artifact_hash = ""
    dense_bf16 = True
    keeps_rope = True

    def __init__(self, config: ModelConfig, attention: DenseAttention) -> None:
        self._config = config
        self._attention = attention
        self._layer = DenseLayer(attention)
        # The reference reads sequence lengths on the host, which a CUDA graph cannot capture.
        self.graph_safe = not isinstance(attention, ReferenceAttention)

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        by_halves: bool = False,
    ) -> Self:
        """See `runtime.kv.format.KVFormatFactory`."""
        if not by_halves:
            return cls(config, dense_attention(config, device, dtype))
        from runtime.attention.gpu import TritonAttention  # optional: Triton

        heads = config.num_heads, config.num_kv_heads, config.head_dim
        return cls(config, TritonAttention(*heads, by_halves=True))

    @property
    def kernels(self) -> str:
        return f"{self._attention.name}-{self._attention.version}"

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:  # noqa: ARG002 - all alike
        shape = (self._config.num_kv_heads, page_size, self._config.head_dim)
        return Plane("k", torch.bfloat16, shape), Plane("v", torch.bfloat16, shape)

    def layer(self, index: int) -> DenseLayer:  # noqa: ARG002 - all layers are alike
        return self._layer
