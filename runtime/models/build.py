"""Build models whose linear layers use torch or, on the CPU, oneDNN and `runtime.layers.loops`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.assemble import nbytes, step_weight_bytes
from runtime.checkpoint.sharing import layers_with_bases
from runtime.checkpoint.weights import Checkpoint, LayersOnDemand, layer_shapes, moved
from runtime.errors import CheckpointError
from runtime.kv.format import KVFormat
from runtime.kv.registry import format_of
from runtime.layers.embedding import embedding_op
from runtime.layers.linear import LinearOp, SharedOps, linear_op, uses_packed_layout
from runtime.layers.residual import ResidualPart
from runtime.layers.vocabulary import Vocabulary
from runtime.models.decoder import DecoderLayer
from runtime.models.model import Model
from runtime.models.registry import model_family
from runtime.parallel.group import ONE_RANK, RankGroup
from runtime.parallel.partition import Partition, Scheme


def build_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
    kv_format: str = "dense",
    group: RankGroup = ONE_RANK,
    streamed: bool = False,
) -> Model:
    """Prepare a checkpoint to run on one device.

    The weights are moved to the device and packed one layer at a time, to limit peak memory. A
    basis that layers share stays on the device unpacked until the last of them is packed.

    Args:
        dtype: dtype of the computation.
        page_size: token slots of a page.
        kv_format: built-in name, ``name:PATH`` or ``module:Class``; see
            `runtime.kv.registry.create_format`.
        group: the ranks of the worker; with several, ``checkpoint`` is the part of one rank, see
            `runtime.checkpoint.slices`.
        streamed: whether each forward pass moves the layers to the device one at a time, instead
            of keeping all of them there.

    Raises:
        CheckpointError: the model is an encoder.
        KVFormatError: the KV format is unknown or does not support the model.
        ValueError: attention on a GPU does not support the model.
    """
    config = checkpoint.config
    device = torch.device(device)
    chosen = format_of(kv_format, checkpoint, device, dtype)
    placed: dict[int, Tensor] = {}
    placing = partial(moved, device=device, dtype=dtype, placed=placed)
    lm_head = linear_op(placing(checkpoint.lm_head))
    embed, embed_positions = _embeddings(checkpoint, placing, lm_head)
    placed.clear()  # frees tensors that were copied into packed ones
    vocabulary = Vocabulary.of(config.vocab_size, checkpoint.partition, group)
    residual = ResidualPart.of(checkpoint.partition, config.hidden_size, group)
    return Model(
        config=config,
        kv_format=chosen,
        device=device,
        dtype=dtype,
        page_size=page_size,
        final_norm=_final_norm(checkpoint, placing),
        embed=vocabulary.embedding(embed),
        layers=_streamed(checkpoint, device, dtype, chosen)
        if streamed
        else _layers(checkpoint, device, dtype, group, chosen, residual),
        lm_head=lm_head,
        vocabulary=vocabulary,
        matmul=_matmul(checkpoint.partition, device, dtype),
        weight_bytes=nbytes(checkpoint, dtype),
        step_weight_bytes=step_weight_bytes(checkpoint, dtype),
        group=group,
        embed_positions=embed_positions,
        residual=residual,
    )


def _final_norm(
    checkpoint: Checkpoint, placing: Callable[[Any], Any]
) -> Callable[[Tensor], Tensor]:
    config = checkpoint.config
    family = model_family(config)
    if family.encoder:
        raise CheckpointError(f"{config.architecture} is an encoder, which cannot generate text")
    weight, bias = placing(checkpoint.final_norm), placing(checkpoint.final_norm_bias)
    return family.norm.for_serving(weight, config.rms_norm_eps, bias)


def _embeddings(
    checkpoint: Checkpoint, placing: Callable[[Any], Any], lm_head: LinearOp
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]:
    """Return the embeddings of token ids and of positions, see `Model`."""
    tied = lm_head if checkpoint.lm_head is checkpoint.embedding else None
    tokens = embedding_op(placing(checkpoint.embedding), tied)
    if checkpoint.positions is None:
        return tokens, None
    return tokens, embedding_op(placing(checkpoint.positions))


def _matmul(partition: Partition | None, device: torch.device, dtype: torch.dtype) -> str:
    if partition is not None and partition.scheme is Scheme.BASE:
        return "summed"
    return "packed" if uses_packed_layout(device, dtype) else "plain"


def _streamed(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, kv_format: KVFormat
) -> LayersOnDemand:
    """Return layers that are moved to the device when accessed; only the last one stays there."""
    config = checkpoint.config
    family = model_family(config)

    def build(index: int) -> DecoderLayer:
        weights = moved(checkpoint.layers[index], device, dtype, {})
        weights = kv_format.fold_weights(index, weights)
        return DecoderLayer.build(family, config, weights, {})

    return LayersOnDemand(build, layer_shapes(checkpoint))


def _layers(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    group: RankGroup,
    kv_format: KVFormat,
    residual: ResidualPart | None,
) -> list[DecoderLayer]:
    """Build the layers. Only one layer, and V that later ones share, are on the device unpacked."""
    config, partition = checkpoint.config, checkpoint.partition
    family = model_family(config)
    scheme = Scheme.LOW_RANK if partition is None else partition.scheme
    placed: dict[int, Tensor] = {}
    ops: SharedOps = {}
    layers: list[DecoderLayer] = []
    for index, (layer, shared) in enumerate(layers_with_bases(checkpoint)):
        weights = kv_format.fold_weights(index, moved(layer, device, dtype, placed))
        del layer  # freed before the next one is read
        layers.append(DecoderLayer.build(family, config, weights, ops, group, scheme, residual))
        del weights
        placed = {key: tensor for key, tensor in placed.items() if key in shared}
        kept = set(map(id, placed.values()))
        ops = {ids: op for ids, op in ops.items() if kept.issuperset(ids)}
    return layers
