"""One decoder layer of the Llama family over paged KV."""

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.checkpoint.weights import LayerWeights
from runtime.config import ModelConfig
from runtime.kv.format import KVFormat
from runtime.layers.linear import Packed, Projection
from runtime.layers.pointwise import RmsNorm, silu_mul


class DecoderLayer:
    """Weights of one layer, packed: q|k|v and gate|up are one projection each.

    ``packed`` goes from layer to layer, for bases that they share.
    """

    def __init__(self, config: ModelConfig, weights: LayerWeights, packed: Packed) -> None:
        self._config = config

        def norm(weight: Tensor) -> RmsNorm:
            return RmsNorm(weight, config.rms_norm_eps)

        self._input_norm, self._post_norm = norm(weights.input_norm), norm(weights.post_norm)
        self._head_norms = None
        if weights.q_norm is not None and weights.k_norm is not None:
            self._head_norms = norm(weights.q_norm), norm(weights.k_norm)
        self._qkv = Projection([weights.q, weights.k, weights.v], packed)
        self._o = Projection([weights.o], packed)
        self._gate_up = Projection([weights.gate, weights.up], packed)
        self._down = Projection([weights.down], packed)

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
        *,
        last: bool,
    ) -> Tensor:
        """``[n, hidden]`` to the same; K and V of the batch go into ``planes``.

        The last layer goes on with the tokens after which logits are wanted: ``[m, hidden]``.
        """
        qkv = self._norm_heads(self._qkv(self._input_norm(hidden)))
        q = kv_format.append(qkv, rope, planes, batch)
        if last and len(batch.logit_rows) < len(hidden):
            q, hidden = q[batch.logit_rows], hidden[batch.logit_rows]
            batch = batch.where_logits()
        if not len(hidden):
            return hidden
        hidden = self._o(kv_format.attend(q, planes, batch)).add_(hidden)
        inner = silu_mul(self._gate_up(self._post_norm(hidden)))
        return self._down(inner).add_(hidden)

    def _norm_heads(self, qkv: Tensor) -> Tensor:
        """Qwen3's RMSNorm of every query and key head, before RoPE."""
        if self._head_norms is None:
            return qkv
        norm_q, norm_k = self._head_norms
        heads, kv_heads = self._config.num_heads, self._config.num_kv_heads
        by_head = qkv.view(len(qkv), -1, self._config.head_dim)
        q, k, v = torch.split(by_head, [heads, kv_heads, kv_heads], dim=1)
        q, k = q.contiguous(), k.contiguous()  # which norms any row alike
        normed = (norm_q(q), norm_k(k), v)
        return torch.cat(normed, dim=1).flatten(1)
