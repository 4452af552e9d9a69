"""The decode step of a model: the megakernel where it can compute the step, else layer by layer."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.gemm.model import HOPPER, GemmModel
from runtime.kv.cache import PagedCache
from runtime.kv.format import KV_PLANES
from runtime.kv.windowed import WindowedFormat
from runtime.models.model import Model


def decode_step(model: Model, batch: Batch, cache: PagedCache) -> Callable[[], Tensor]:
    """Return a function that computes `Model.forward` for a batch of static tensors.

    It uses the megakernel if that supports the model, the device and the batch, which must have
    one token per sequence and at most `most_sequences` sequences. The next call overwrites the
    result.

    Args:
        batch: a batch whose tensors keep their addresses. Every call reads their contents.
    """
    if isinstance(model, GemmModel) and _megakernel_computes(model, batch):
        return _megakernel_step(model, batch, cache)
    return partial(model.forward, batch, cache)


def unsupported_by_megakernel(model: Model) -> str | None:
    """Return why the megakernel cannot compute decode steps of a model, or None if it can."""
    if not isinstance(model, GemmModel):
        return "the megakernel needs packed weights"
    kv_format = model.kv_format
    attends = isinstance(kv_format, WindowedFormat) and kv_format.graph_safe
    if not (kv_format.dense_bf16 or attends):
        return f"the megakernel does not support KV format {kv_format.name}"
    if model.group.size > 1 and model.group.memory is None:
        return "the ranks have no GPU memory that all of them can write"
    if model.page_size % 16:
        return f"pages of {model.page_size} tokens: the megakernel needs a multiple of 16"
    from runtime.megakernel.launch import unsupported

    return unsupported(model.weights)


def _megakernel_computes(model: GemmModel, batch: Batch) -> bool:
    """Return whether the megakernel supports a model, its device and a batch."""
    if model.device.type != "cuda" or unsupported_by_megakernel(model):
        return False
    from runtime.megakernel.launch import most_sequences

    one_each = batch.single and len(batch.logit_rows) == len(batch.tokens)
    hopper = torch.cuda.get_device_capability(model.device) == HOPPER
    attends = model.kv_format.dense_bf16
    most = most_sequences(model.weights, model.group.size, attends=attends)
    return hopper and one_each and len(batch.tokens) <= most


def _megakernel_step(model: GemmModel, batch: Batch, cache: PagedCache) -> Callable[[], Tensor]:
    from runtime.megakernel.launch import DecodeStep

    programs = torch.cuda.get_device_properties(model.device).multi_processor_count
    weights, rope, kv_format = model.weights, model.rope, model.kv_format
    first_token = model.vocabulary.own.start
    memory = model.group.memory
    make = partial(DecodeStep, programs=programs, memory=memory, first_token=first_token)
    if not isinstance(kv_format, WindowedFormat):
        return make(weights, cache.planes, rope, batch).launch
    layers = [cache.layer(index) for index in range(model.config.num_layers)]
    full_precision = [plane for planes in layers for plane in planes[:KV_PLANES]]
    attend = kv_format.decode_attention(layers, batch)
    step = make(weights, full_precision, rope, batch, attend=attend)
    encoder = kv_format.encoder(layers)

    def run() -> Tensor:
        encoder.encode_leaving(batch)
        return step.launch()

    return run
