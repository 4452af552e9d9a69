"""Backends of the FlashSVD papers compared with encoders in fp32."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.weights import FactorPair
from runtime.config import EncoderConfig
from runtime.encoder.attention import ReferenceAttention
from runtime.encoder.batch import EncoderInput, RaggedBatch
from runtime.encoder.bert import BertBackbone
from runtime.errors import RuntimeFault
from runtime.offline.bench.encoder import SHAPES, random_encoder
from runtime.offline.bench.flashsvd.model import FlashSVD15Layer, FlashSVDEncoder, FlashSVDLayer
from runtime.offline.bench.flashsvd.ops import (
    ResidentAttention,
    ResidentFfn,
    StreamingAttention,
    StreamingFfn,
    in_powers,
    resident_ffn,
)
from tests.runtime.device import DEVICE, random

pytestmark = [pytest.mark.triton, pytest.mark.long]

LENGTHS = (1, 64, 65, 5)


def shape(dim: int, heads: int) -> EncoderConfig:
    return replace(
        SHAPES["bert-base"],
        vocab_size=50,
        hidden_size=dim * heads,
        intermediate_size=192,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
    )


def batch_of(lengths: Sequence[int]) -> RaggedBatch:
    inputs = [EncoderInput(tuple(at % 50 for at in range(length))) for length in lengths]
    return RaggedBatch.of(inputs, DEVICE)


def pair_of(out: int, rank: int, inner: int, seed: int, *, bias: bool = True) -> FactorPair:
    return FactorPair(
        (random(out, rank, seed=seed) / rank**0.5).bfloat16(),
        (random(rank, inner, seed=seed + 1) / inner**0.5).bfloat16(),
        random(out, seed=seed + 2).bfloat16() if bias else None,
    )


def product(p: Tensor, pair: FactorPair) -> Tensor:
    bias = None if pair.bias is None else pair.bias.float()
    return functional.linear(p.float(), pair.u.float(), bias)


@pytest.mark.parametrize("kind", [StreamingAttention, ResidentAttention])
@pytest.mark.parametrize(("dim", "heads"), [(32, 2), (64, 1)])
@pytest.mark.parametrize("lengths", [LENGTHS, (256,), (300,)])
def test_attention_in_rank_space_equals_the_reference(
    kind: type[StreamingAttention], dim: int, heads: int, lengths: Sequence[int]
) -> None:
    config, batch, n = shape(dim, heads), batch_of(lengths), sum(lengths)
    pairs = [
        pair_of(dim * heads, rank, 8, seed, bias=rank != 16)
        for rank, seed in ((48, 1), (16, 5), (80, 9))
    ]
    packed = random(n, 48 + 16 + 80).bfloat16()  # row strides differ from the ranks
    inner = torch.split(packed, [48, 16, 80], dim=1)
    q, k, v = (product(p, pair) for p, pair in zip(inner, pairs, strict=True))
    expected = ReferenceAttention(config)(q, k, v, batch)
    found = kind(config, pairs)(inner, batch)
    # Q, K and V are rounded to bf16, as is the result.
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", [StreamingFfn, ResidentFfn])
@pytest.mark.parametrize(("rank", "out_rank"), [(48, 32), (16, 304), (304, 80)])
@pytest.mark.parametrize("n", [1, 130])
def test_mlp_in_rank_space_equals_torch(
    kind: type[StreamingFfn], rank: int, out_rank: int, n: int
) -> None:
    up, down = pair_of(192, rank, 8, 1), pair_of(8, out_rank, 192, 4)
    p = random(n, rank).bfloat16()
    expected = functional.linear(functional.gelu(product(p, up)), down.v.float())
    found = kind(up, down)(p)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layer", [FlashSVDLayer, FlashSVD15Layer])
def test_encoder_equals_the_reference(layer: Callable[[EncoderConfig, Any], Any]) -> None:
    config, batch = shape(32, 2), batch_of((5, 70))
    checkpoint = random_encoder(config, 0.7)
    expected = BertBackbone(checkpoint, DEVICE, torch.float32, "reference")(batch)
    found = FlashSVDEncoder(checkpoint, DEVICE, torch.float32, layer)(batch)
    # On a GPU, Triton multiplies fp32 with tf32.
    tolerance = 1e-2 if DEVICE.type == "cuda" else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_dense_linears_and_other_shapes_are_refused() -> None:
    dense = random_encoder(shape(32, 2), None)
    with pytest.raises(RuntimeFault, match="q is dense"):
        FlashSVDEncoder(dense, DEVICE, torch.float32, FlashSVDLayer)
    with pytest.raises(RuntimeFault, match="heads of 24"):
        StreamingAttention(shape(24, 2), [])
    with pytest.raises(RuntimeFault, match="72 inner"):
        StreamingFfn(pair_of(72, 16, 8, 1), pair_of(8, 16, 72, 4))


def test_attention_over_long_inputs_streams_tiles() -> None:
    config, batch = shape(32, 1), batch_of((513,))
    pairs = [pair_of(32, 16, 8, seed) for seed in (1, 5, 9)]
    inner = [random(513, 16, seed=seed).bfloat16() for seed in (2, 6, 10)]
    found = ResidentAttention(config, pairs)(inner, batch)
    q, k, v = (product(p, pair) for p, pair in zip(inner, pairs, strict=True))
    expected = ReferenceAttention(config)(q, k, v, batch)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


def test_large_ranks_use_the_streaming_kernel() -> None:
    up, down = pair_of(64, 16, 8, 1), pair_of(8, 528, 64, 4)
    assert type(resident_ffn(up, down)) is StreamingFfn
    assert type(resident_ffn(up, up)) is ResidentFfn


def test_tiles_cover_every_rank() -> None:
    for rank in range(16, 1025, 16):
        low, high = in_powers(rank)
        assert rank <= low + high < 2 * rank + 16
        assert low.bit_count() == 1
        assert high.bit_count() <= 1
