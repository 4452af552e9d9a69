"""KV format `dense`: keys after RoPE and values, as bf16. The only lossless one."""

import torch
from torch import Tensor

from runtime.attention.base import Batch, DenseAttention
from runtime.config import ModelConfig
from runtime.kv.format import Plane


class DenseFormat:
    """See `runtime.kv.format.KVFormat`. Planes are bf16 whatever the model computes in."""

    name = "dense"
    version = 1
    lossless = True
    artifact_hash = ""

    def __init__(self, attention: DenseAttention) -> None:
        self._attention = attention

    @property
    def kernels(self) -> str:
        return f"{self._attention.name}-{self._attention.version}"

    def planes(self, config: ModelConfig, page_size: int) -> tuple[Plane, ...]:
        shape = (config.num_kv_heads, page_size, config.head_dim)
        return Plane("k", torch.bfloat16, shape), Plane("v", torch.bfloat16, shape)

    def bytes_per_token(self, config: ModelConfig) -> int:
        return config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2

    def append(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor], planes: tuple[Tensor, ...], batch: Batch
    ) -> Tensor:
        k_pages, v_pages = planes
        return self._attention.write(qkv, rope, k_pages, v_pages, batch)

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], batch: Batch) -> Tensor:
        k_pages, v_pages = planes
        return self._attention.attend(q, k_pages, v_pages, batch)

    def decode_dense(
        self, planes: tuple[Tensor, ...], pages: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        keys, values = (
            plane[pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for plane in planes
        )
        return keys, values
