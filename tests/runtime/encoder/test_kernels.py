"""Triton kernels of encoders compared with torch."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from runtime.checkpoint.weights import Dense, FactorPair, moved
from runtime.config import EncoderConfig
from runtime.encoder.attention import ReferenceAttention
from runtime.encoder.batch import EncoderInput, RaggedBatch
from runtime.encoder.bert import BertBackbone
from runtime.encoder.gpu import FusedEmbeddings, TritonRaggedAttention, add_norm, gelu
from runtime.encoder.packed import PackedEncoderLayers, StackedLinears
from runtime.encoder.passes import Passes
from runtime.offline.bench.encoder import SHAPES, random_encoder
from tests.runtime.device import DEVICE, random

pytestmark = [pytest.mark.triton, pytest.mark.long]

LENGTHS = (1, 63, 64, 65, 5, 129)


def shape(dim: int, heads: int) -> EncoderConfig:
    return replace(
        SHAPES["bert-base"],
        vocab_size=50,
        hidden_size=dim * heads,
        intermediate_size=72,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
    )


def batch_of(lengths: Sequence[int]) -> RaggedBatch:
    inputs = [EncoderInput(tuple(at % 50 for at in range(length))) for length in lengths]
    return RaggedBatch.of(inputs, DEVICE)


@pytest.mark.parametrize(("dim", "heads"), [(32, 3), (64, 2), (24, 2), (128, 1)])
@pytest.mark.parametrize("lengths", [LENGTHS, (300,), ()])
def test_attention_equals_the_reference(dim: int, heads: int, lengths: Sequence[int]) -> None:
    config, batch = shape(dim, heads), batch_of(lengths)
    q, k, v = random(sum(lengths), 3 * dim * heads).bfloat16().chunk(3, dim=1)
    found = TritonRaggedAttention(config)(q, k, v, batch)
    expected = ReferenceAttention(config)(q.float(), k.float(), v.float(), batch)
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    assert found.is_contiguous()


def test_queries_may_have_another_stride_than_keys() -> None:
    config, batch = shape(32, 2), batch_of(LENGTHS)
    q = random(sum(LENGTHS), 64).bfloat16()
    k, v = random(sum(LENGTHS), 128, seed=5).bfloat16().chunk(2, dim=1)
    expected = ReferenceAttention(config)(q.float(), k.float(), v.float(), batch)
    found = TritonRaggedAttention(config)(q, k, v, batch)
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("width", [48, 768])
@pytest.mark.parametrize("rows", [1, 7])
def test_add_norm_equals_torch(rows: int, width: int) -> None:
    x, added = random(rows, width).bfloat16(), random(rows, width, seed=5).bfloat16()
    weight, bias = random(2, width, seed=6).bfloat16()
    expected = functional.layer_norm(
        x.float() + added.float(), (width,), weight.float(), bias.float(), 1e-12
    )
    found = add_norm(x, added, weight, bias, 1e-12)
    assert found is x
    torch.testing.assert_close(found.float(), expected, rtol=8e-3, atol=1e-5)


def test_gelu_equals_torch() -> None:
    x = torch.linspace(-12, 12, 5001, device=DEVICE)
    expected = functional.gelu(x.double()).float()
    torch.testing.assert_close(gelu(x.clone()), expected, rtol=1e-5, atol=2e-7)


def test_linears_may_mix_matrices_and_factor_pairs() -> None:
    x = random(5, 16)
    dense = Dense(random(6, 16, seed=1), random(6, seed=2))
    pairs = [
        FactorPair(random(8, 3, seed=3), random(3, 16, seed=4), random(8, seed=5)),
        FactorPair(random(4, 9, seed=6), random(9, 16, seed=7)),
    ]
    expected = [functional.linear(x, dense.weight, dense.bias)]
    expected += [functional.linear(x, pair.u @ pair.v, pair.bias) for pair in pairs]
    found = StackedLinears([dense, *pairs])(x)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 128, 400])
def test_attention_of_parts_with_biases_may_overwrite_queries(tokens: int) -> None:
    config, batch = shape(32, 2), batch_of(LENGTHS)
    q, k, v = random(3, sum(LENGTHS), 64).bfloat16()
    q_bias, v_bias = random(2, 64, seed=5).bfloat16()
    expected = ReferenceAttention(config)(
        (q.float() + q_bias.float()), k.float(), v.float() + v_bias.float(), batch
    )
    attention, first = TritonRaggedAttention(config), 0
    for part in batch.divided(tokens):
        own = slice(first, first + len(part.tokens))
        first = own.stop
        attention.attend(q[own], k[own], v[own], part, q[own], q_bias, v_bias)
    assert first == len(q)
    torch.testing.assert_close(q.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("types", [True, False])
def test_embeddings_equal_torch(types: bool) -> None:
    words, places, kinds = (random(n, 48, seed=n).bfloat16() for n in (50, 130, 2))
    weight, bias = random(2, 48, seed=6).bfloat16()
    inputs = [
        EncoderInput((49, 0, 7, 7, 3), (0, 1, 1, 0, 1) if types else ()),
        EncoderInput(tuple(range(13))),
    ]
    batch = RaggedBatch.of(inputs, DEVICE)
    chosen = torch.zeros_like(batch.tokens) if batch.types is None else batch.types
    assert (batch.types is None) is not types
    indices = batch.tokens, batch.positions, chosen
    rows = [
        table.float()[index] for table, index in zip((words, places, kinds), indices, strict=True)
    ]
    total = torch.stack(rows).sum(0)
    expected = functional.layer_norm(total, (48,), weight.float(), bias.float(), 1e-12)
    found = FusedEmbeddings(words, places, kinds, weight, bias, 1e-12)(batch)
    torch.testing.assert_close(found.float(), expected, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("keep", [None, 0.5])
@pytest.mark.parametrize(
    "passes",
    [Passes(), Passes(attention_tokens=70, mlp_tokens=50)],
    ids=["default", "small"],
)
def test_layers_equal_those_of_the_reference(keep: float | None, passes: Passes) -> None:
    config, batch = shape(32, 2), batch_of(LENGTHS)
    checkpoint = random_encoder(config, keep)
    backbone = BertBackbone(checkpoint, DEVICE, torch.float32, "reference")
    expected = backbone(batch)
    layers = [moved(layer, DEVICE, torch.float32, {}) for layer in checkpoint.layers]
    attention = TritonRaggedAttention(config)
    backbone.layers = PackedEncoderLayers(config, layers, attention, passes)
    # On a GPU, Triton multiplies fp32 with tf32.
    tolerance = 1e-2 if DEVICE.type == "cuda" else 1e-4
    torch.testing.assert_close(backbone(batch), expected, rtol=tolerance, atol=tolerance)
