"""One decoder layer of the Llama family over paged KV."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.checkpoint.weights import LayerWeights
from runtime.config import ModelConfig
from runtime.kv.format import LayerKV
from runtime.layers.linear import Packed, Projection
from runtime.layers.pointwise import RmsNorm, silu_mul

Prefill = Callable[[Tensor, tuple[Tensor, Tensor], tuple[Tensor, ...], Batch], Tensor]


@dataclass(frozen=True)
class LayerParts:
    """What a layer is made of: projections, `[n, in]` to `[n, out]`, and norms.

    Attributes:
        qkv: q, k and v side by side.
        gated: SiLU(gate) · up.
        o, down: also given the residual stream, which they add to, and may overwrite.
        head_norms: those of q and k, if there are any.
        prefill: attention of a batch with several tokens of a sequence, from the normed residual
            stream on, if that is one thing.
    """

    input_norm: Callable[[Tensor], Tensor]
    post_norm: Callable[[Tensor], Tensor]
    qkv: Callable[[Tensor], Tensor]
    o: Callable[[Tensor, Tensor], Tensor]
    gated: Callable[[Tensor], Tensor]
    down: Callable[[Tensor, Tensor], Tensor]
    factorized: bool
    head_norms: tuple[RmsNorm, RmsNorm] | None = None
    prefill: Prefill | None = None

    @classmethod
    def of(cls, config: ModelConfig, weights: LayerWeights, packed: Packed) -> "LayerParts":
        """By the best products there are. ``packed`` goes from layer to layer, for bases that they
        share."""

        def norm(weight: Tensor) -> RmsNorm:
            return RmsNorm(weight, config.rms_norm_eps)

        head_norms = None
        if weights.q_norm is not None and weights.k_norm is not None:
            head_norms = norm(weights.q_norm), norm(weights.k_norm)
        qkv = Projection([weights.q, weights.k, weights.v], packed)
        o = Projection([weights.o], packed)
        gate_up = Projection([weights.gate, weights.up], packed)
        down = Projection([weights.down], packed)
        return cls(
            input_norm=norm(weights.input_norm),
            post_norm=norm(weights.post_norm),
            qkv=qkv,
            o=Added(o),
            gated=Gated(gate_up),
            down=Added(down),
            factorized=any(one.factorized for one in (qkv, o, gate_up, down)),
            head_norms=head_norms,
        )


@dataclass(frozen=True)
class Added:
    """A projection, and the residual stream with it."""

    product: Projection

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.product(x).add_(hidden)


@dataclass(frozen=True)
class Gated:
    """SiLU(gate) · up of the two side by side."""

    product: Projection

    def __call__(self, x: Tensor) -> Tensor:
        return silu_mul(self.product(x))


class DecoderLayer:
    """One layer of a model of this shape."""

    def __init__(self, config: ModelConfig, parts: LayerParts) -> None:
        self._config, self._parts = config, parts

    @property
    def factorized(self) -> bool:
        """Whether some projection is a factor pair."""
        return self._parts.factorized

    @property
    def projections(self) -> tuple[Callable[..., Tensor], ...]:
        """In the order in which they are computed."""
        return self._parts.qkv, self._parts.o, self._parts.gated, self._parts.down

    def __call__(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        kv: LayerKV,
        planes: tuple[Tensor, ...],
        batch: Batch,
        *,
        last: bool,
    ) -> Tensor:
        """``[n, hidden]`` to the same; K and V of the batch go into ``planes``.

        The last layer goes on with the tokens after which logits are wanted: ``[m, hidden]``.
        """
        parts, some = self._parts, last and len(batch.logit_rows) < len(hidden)
        normed = parts.input_norm(hidden)
        if parts.prefill is not None and not (some or batch.single):
            attended = parts.prefill(normed, rope, planes, batch)
        else:
            q = kv.append(self._norm_heads(parts.qkv(normed)), rope, planes, batch)
            if some:
                q, hidden = q[batch.logit_rows], hidden[batch.logit_rows]
                batch = batch.where_logits()
            if not len(hidden):
                return hidden
            attended = kv.attend(q, planes, batch)
        hidden = parts.o(attended, hidden)
        return parts.down(parts.gated(parts.post_norm(hidden)), hidden)

    def _norm_heads(self, qkv: Tensor) -> Tensor:
        """Qwen3's RMSNorm of every query and key head, before RoPE."""
        if self._parts.head_norms is None:
            return qkv
        norm_q, norm_k = self._parts.head_norms
        heads, kv_heads = self._config.num_heads, self._config.num_kv_heads
        by_head = qkv.view(len(qkv), -1, self._config.head_dim)
        q, k, v = torch.split(by_head, [heads, kv_heads, kv_heads], dim=1)
        q, k = q.contiguous(), k.contiguous()  # which norms any row alike
        normed = (norm_q(q), norm_k(k), v)
        return torch.cat(normed, dim=1).flatten(1)
