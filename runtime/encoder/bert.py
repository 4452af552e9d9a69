"""The transformer of BERT and RoBERTa over ragged batches, and their classification head."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.products import without_large_pairs
from runtime.checkpoint.sharing import layers_with_bases
from runtime.checkpoint.weights import Checkpoint, moved
from runtime.config import EncoderConfig
from runtime.encoder.attention import RaggedAttention, attention_of
from runtime.encoder.batch import RaggedBatch
from runtime.encoder.ffn import feed_forward
from runtime.encoder.pooling import Head
from runtime.layers.embedding import embedding_op
from runtime.layers.linear import SharedOps, linear_op
from runtime.models.bert import EncoderFamily, EncoderParts, activation_of, encoder_config
from runtime.models.decoder import ServingBuilder
from runtime.models.registry import model_family


class EncoderLayer:
    """One layer of an encoder.

    Attributes:
        parts: callables for the parts of the layer.
    """

    def __init__(
        self, family: EncoderFamily, parts: EncoderParts, attention: RaggedAttention
    ) -> None:
        self._family = family
        self._attention = attention
        self.parts = parts

    def __call__(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        """Return the residual stream `[n, hidden]` after the layer."""
        x, carried = self._family.before_attention(self.parts, hidden)
        q, k, v = self.parts.qkv(x).chunk(3, dim=1)
        attended = self._attention(q, k, v, batch)
        return self._family.after_attention(self.parts, attended, *carried)


class BertBackbone:
    """Embeddings and layers of BERT or RoBERTa, prepared for one device.

    Factor pairs with more parameters than their product are multiplied out.

    Args:
        checkpoint: a model of an `EncoderFamily`.
        backend: see `runtime.encoder.attention.attention_of`.

    Attributes:
        attention: the attention of all layers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        backend: str,
    ) -> None:
        self.config = encoder_config(checkpoint.config)
        self.attention = attention_of(backend, self.config, device, dtype)
        packed = self.attention.name == "triton" and dtype == torch.bfloat16
        packed = packed and self.config.activation == "gelu"
        family = encoder_family(self.config)
        placed = partial(moved, device=device, dtype=dtype, placed={})
        self._tokens = embedding_op(placed(checkpoint.embedding))
        self._positions = placed(checkpoint.positions)
        self._types = placed(checkpoint.more[family.token_types])
        norm = family.embedding_norm
        self._norm = family.norm.for_serving(
            placed(checkpoint.more[f"{norm}.weight"]),
            self.config.rms_norm_eps,
            placed(checkpoint.more[f"{norm}.bias"]),
        )
        build = self._packed_layer if packed else partial(self._layer, family)
        self.layers: list[Callable[[Tensor, RaggedBatch], Tensor]] = [
            build(moved(without_large_pairs(weights, device, dtype), device, dtype, {}))
            for weights, _ in layers_with_bases(checkpoint)
        ]

    def _layer(self, family: EncoderFamily, weights: Any) -> EncoderLayer:
        shared: SharedOps = {}
        build = ServingBuilder(family, self.config, weights, shared)
        up, down = build.linear("up"), build.residual("down")
        ffn = feed_forward(up, activation_of(self.config), down)
        return EncoderLayer(family, replace(family.parts(build), ffn=ffn), self.attention)

    def _packed_layer(self, weights: Any) -> Callable[[Tensor, RaggedBatch], Tensor]:
        from runtime.encoder.packed import PackedEncoderLayer  # optional: Triton

        return PackedEncoderLayer(self.config, weights, self.attention)

    @property
    def name(self) -> str:
        return self.attention.name

    def __call__(self, batch: RaggedBatch) -> Tensor:
        hidden = self._tokens(batch.tokens)
        types = self._types[0] if batch.types is None else self._types[batch.types]
        hidden = self._norm(hidden + types + self._positions[batch.positions])
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return hidden


def encoder_family(config: EncoderConfig) -> EncoderFamily:
    """Return the family of an encoder."""
    family = model_family(config)
    assert isinstance(family, EncoderFamily)
    return family


def classification_head(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Head:
    """Return the logits of the labels from the hidden state of the first token."""
    family = encoder_family(encoder_config(checkpoint.config))
    placed = partial(moved, device=device, dtype=dtype, placed={})
    pooler, classifier = (
        linear_op(
            placed(checkpoint.more[f"{name}.weight"]), placed(checkpoint.more[f"{name}.bias"])
        )
        for name in family.head
    )

    def head(hidden: Tensor, batch: RaggedBatch) -> Tensor:
        first = hidden[batch.starts[:-1].long()]
        return classifier(torch.tanh(pooler(first)))

    return head
