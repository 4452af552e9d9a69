"""The transformer of BERT and RoBERTa over ragged batches, and their classification head."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
from runtime.encoder.passes import Passes
from runtime.encoder.pooling import Head
from runtime.layers.embedding import embedding_op
from runtime.layers.linear import SharedOps, linear_op
from runtime.models.bert import EncoderFamily, EncoderParts, activation_of, encoder_config
from runtime.models.decoder import ServingBuilder
from runtime.models.registry import model_family

_DEFAULT_PASSES = Passes()


@dataclass(frozen=True)
class EncoderLayers:
    """Layers one after another."""

    layers: Sequence["EncoderLayer"]

    def __call__(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        """Return the residual stream `[n, hidden]` after all layers."""
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return hidden


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


@dataclass(frozen=True)
class Embeddings:
    """The sum of the embeddings of each token, its position and its type, and its norm.

    Attributes:
        tokens: embeddings of token ids.
        positions, types: tables `[…, hidden]`.
    """

    tokens: Callable[[Tensor], Tensor]
    positions: Tensor
    types: Tensor
    norm: Callable[[Tensor], Tensor]

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Return `[n, hidden]`."""
        types = self.types[0] if batch.types is None else self.types[batch.types]
        return self.norm(self.tokens(batch.tokens) + types + self.positions[batch.positions])


class BertBackbone:
    """Embeddings and layers of BERT or RoBERTa, prepared for one device.

    Factor pairs with more parameters than their product are multiplied out.

    Args:
        checkpoint: a model of an `EncoderFamily`.
        backend: see `runtime.encoder.attention.attention_of`.
        passes: how layers in bf16 on a GPU divide their tokens.

    Attributes:
        attention: the attention of all layers.
        packed: whether the layers are those of `runtime.encoder.packed`.
        layers: all layers as one function of the residual stream `[n, hidden]`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        backend: str,
        passes: Passes = _DEFAULT_PASSES,
    ) -> None:
        self.config = encoder_config(checkpoint.config)
        self.attention = attention_of(backend, self.config, device, dtype)
        packed = self.attention.name == "triton" and dtype == torch.bfloat16
        self.packed = packed and self.config.activation == "gelu"
        family = encoder_family(self.config)
        placed = partial(moved, device=device, dtype=dtype, placed={})
        tables = checkpoint.embedding, checkpoint.positions, checkpoint.more[family.token_types]
        norm = [checkpoint.more[f"{family.embedding_norm}.{n}"] for n in ("weight", "bias")]
        layers = (
            moved(without_large_pairs(weights, device, dtype), device, dtype, {})
            for weights, _ in layers_with_bases(checkpoint)
        )
        self._embeddings: Callable[[RaggedBatch], Tensor]
        self.layers: Callable[[Tensor, RaggedBatch], Tensor]
        if self.packed:
            self._embeddings, self.layers = _packed(
                self.config, placed((*tables, *norm)), layers, self.attention, passes
            )
            return
        tokens, positions, types = placed(tables)
        weight, bias = placed(tuple(norm))
        self._embeddings = Embeddings(
            embedding_op(tokens),
            positions,
            types,
            family.norm.for_serving(weight, self.config.rms_norm_eps, bias),
        )
        self.layers = EncoderLayers([self._layer(family, each) for each in layers])

    def _layer(self, family: EncoderFamily, weights: Any) -> EncoderLayer:
        shared: SharedOps = {}
        build = ServingBuilder(family, self.config, weights, shared)
        up, down = build.linear("up"), build.residual("down")
        ffn = feed_forward(up, activation_of(self.config), down)
        return EncoderLayer(family, replace(family.parts(build), ffn=ffn), self.attention)

    @property
    def name(self) -> str:
        return self.attention.name

    def __call__(self, batch: RaggedBatch) -> Tensor:
        return self.layers(self._embeddings(batch), batch)


def _packed(
    config: EncoderConfig,
    embeddings: tuple[Tensor, ...],
    layers: Iterable[Any],
    attention: Any,
    passes: Passes,
) -> tuple[Callable[[RaggedBatch], Tensor], Callable[[Tensor, RaggedBatch], Tensor]]:
    """Return the embeddings and the layers in bf16 on a GPU.

    Args:
        embeddings: the tables of tokens, positions and types, and weight and bias of the norm.
        layers: weights on the device.
    """
    from runtime.encoder.gpu import FusedEmbeddings  # optional: Triton
    from runtime.encoder.packed import PackedEncoderLayers

    tokens, positions, types, weight, bias = embeddings
    made = PackedEncoderLayers(config, layers, attention, passes)
    embed = FusedEmbeddings(tokens, positions, types, weight, bias, config.rms_norm_eps)
    return embed, made


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
