"""One decoder layer of the Llama family over paged KV."""

import torch
from torch import Tensor
from torch.nn import functional

from runtime.attention.base import Batch
from runtime.checkpoint.weights import LayerWeights
from runtime.config import ModelConfig
from runtime.kv.format import KVFormat
from runtime.layers.linear import Projection


class DecoderLayer:
    """Weights of one layer, packed: q|k|v and gate|up are one projection each."""

    def __init__(self, config: ModelConfig, weights: LayerWeights) -> None:
        self._config = config
        self._input_norm, self._post_norm = weights.input_norm, weights.post_norm
        self._q_norm, self._k_norm = weights.q_norm, weights.k_norm
        self._qkv = Projection([weights.q, weights.k, weights.v])
        self._o = Projection([weights.o])
        self._gate_up = Projection([weights.gate, weights.up])
        self._down = Projection([weights.down])

    @property
    def factorized(self) -> bool:
        """Whether some projection is a factor pair."""
        return any(p.factorized for p in (self._qkv, self._o, self._gate_up, self._down))

    def __call__(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        kv_format: KVFormat,
        planes: tuple[Tensor, ...],
        batch: Batch,
    ) -> Tensor:
        """``[n, hidden]`` to the same; K and V of the batch go into ``planes``."""
        qkv = self._norm_heads(self._qkv(self._norm(hidden, self._input_norm)))
        q = kv_format.append(qkv, rope, planes, batch)
        hidden = hidden + self._o(kv_format.attend(q, planes, batch))
        gate, up = self._gate_up(self._norm(hidden, self._post_norm)).chunk(2, dim=1)
        return hidden + self._down(functional.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)

    def _norm_heads(self, qkv: Tensor) -> Tensor:
        """Qwen3's RMSNorm of every query and key head, before RoPE."""
        if self._q_norm is None or self._k_norm is None:
            return qkv
        heads, kv_heads = self._config.num_heads, self._config.num_kv_heads
        by_head = qkv.view(len(qkv), -1, self._config.head_dim)
        q, k, v = torch.split(by_head, [heads, kv_heads, kv_heads], dim=1)
        normed = (self._norm(q, self._q_norm), self._norm(k, self._k_norm), v)
        return torch.cat(normed, dim=1).flatten(1)
