"""The Triton kernels of format `lowrank`, compared with the torch reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.attention.reference import ReferenceAttention
from runtime.config import ModelConfig, RopeConfig
from runtime.gemm.model import build_gemm_model
from runtime.gemm.weights import by_halves
from runtime.kv.lowrank import reference
from runtime.kv.lowrank.factors import LayerFactors
from runtime.kv.lowrank.gpu import LatentKernels
from runtime.kv.rotation import PageRotation
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from tests.runtime.attention.samples import PAGE, batch_of
from tests.runtime.device import DEVICE, random
from tests.runtime.kv.latent_layers import empty_planes, factors_of, random_latents
from tests.runtime.tiny import CONFIG as TINY
from tests.runtime.tiny import prompt_of, tiny_checkpoint

pytestmark = [pytest.mark.triton, pytest.mark.long]

ULP = 2**-7
"""Largest relative difference of two neighbouring bf16 numbers."""
TOLERANCE = 1e-2
"""Weights and keys are rounded to bf16 before they are multiplied."""
YARN = RopeConfig(scaling="yarn", factor=4.0, original_context=100, attention_factor=1.14)
SHAPES = [
    # query heads, KV heads, head dimension, ranks of K and V
    (6, 2, 16, (13, 11)),
    (8, 4, 64, (100, 40)),
    (4, 4, 20, (24, 16)),
    (3, 1, 96, (70, 90)),
    (8, 1, 128, (72, 130)),
]


def config_of(heads: int, kv_heads: int, dim: int, rope: RopeConfig = TINY.rope) -> ModelConfig:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    return replace(TINY, **sizes, rope=rope)  # type: ignore[arg-type]


def made_of(config: ModelConfig, *, by_halves: bool = False) -> tuple[LatentKernels, PageRotation]:
    rotation = PageRotation(config, DEVICE)
    return LatentKernels(config, rotation, by_halves=by_halves), rotation


def rebuilt(
    config: ModelConfig, factors: LayerFactors, planes: tuple[Tensor, ...], batch: Batch
) -> tuple[Tensor, Tensor]:
    """Return K and V of the reference in pages, bf16, with NaN where there are no tokens."""
    shape = len(planes[0]), config.num_kv_heads, PAGE, config.head_dim
    k, v = torch.full((2, *shape), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    pages, first = reference.pages_of(batch, PAGE)
    rebuild = reference.Rebuild.of(factors, PageRotation(config, DEVICE), config.head_dim)
    keys, values = rebuild(planes, pages, first)
    k[pages], v[pages] = keys.bfloat16(), values.bfloat16()
    return k, v


def in_fp32(factors: LayerFactors) -> LayerFactors:
    k, v = (
        replace(each, u=each.u.float(), bias=None if each.bias is None else each.bias.float())
        for each in (factors.k, factors.v)
    )
    return LayerFactors(k, v)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "ranks"), SHAPES)
def test_append_writes_latents_and_rotates_queries(
    heads: int, kv_heads: int, dim: int, ranks: tuple[int, int], packed: bool
) -> None:
    packed = packed and dim % 16 == 0  # as packed layers require
    config = config_of(heads, kv_heads, dim, YARN)
    factors = factors_of(config, ranks, device=DEVICE)
    kernels, rotation = made_of(config, by_halves=packed)
    batch = batch_of([40, 1, 17], 9, DEVICE)
    qkv = random(len(batch.tokens), heads * dim + sum(ranks))
    found, expected = (empty_planes(factors, 8, DEVICE) for _ in range(2))
    want = reference.append(qkv, rotation.tables, expected, batch, factors, dim)
    if packed:
        q = by_halves(qkv[:, : heads * dim].T.contiguous(), dim).T
        qkv = torch.cat([q, qkv[:, heads * dim :]], dim=1)
    got = kernels.append(qkv, rotation.tables, found, batch, factors)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "ranks"), SHAPES)
def test_rebuilt_pages_are_near_the_reference(
    heads: int, kv_heads: int, dim: int, ranks: tuple[int, int], bias: bool
) -> None:
    config = config_of(heads, kv_heads, dim, YARN if bias else TINY.rope)
    # Tensor cores round fp32 to TF32; torch rounds results to the dtype of the weights.
    factors = factors_of(config, ranks, bias=bias, dtype=torch.bfloat16, device=DEVICE)
    lengths = [1, 16, 130, 47]
    planes = random_latents(factors, lengths, DEVICE)
    batch = batch_of(lengths, 1, DEVICE)
    expected = rebuilt(config, in_fp32(factors), planes, batch)
    found = torch.full_like(torch.stack(expected), torch.nan)
    kernels, _ = made_of(config)
    kernels.rebuild(planes, batch, factors, *found)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=ULP, atol=1e-5, equal_nan=True)
        assert not got[0].isfinite().any(), "page 0 belongs to no sequence"
        differ = (got != want) & want.isfinite()
        assert differ.float().mean() < 0.01


@pytest.mark.parametrize(
    ("shape", "lengths", "dtype", "bias"),
    [
        (0, [1], torch.float32, True),
        (0, [63, 1, 100], torch.bfloat16, False),
        (1, [15, 300, 64], torch.float32, True),
        (1, [1000, 1, 130], torch.bfloat16, True),
        (2, [16, 200], torch.float32, False),
        (3, [130, 17], torch.bfloat16, True),
        (4, [300, 129], torch.float32, True),
        (4, [200, 5], torch.bfloat16, False),
    ],
)
def test_decode_matches_attention_over_rebuilt_pages(
    shape: int, lengths: list[int], dtype: torch.dtype, bias: bool
) -> None:
    heads, kv_heads, dim, ranks = SHAPES[shape]
    config = replace(
        config_of(heads, kv_heads, dim, YARN if bias else TINY.rope), context_length=1024
    )
    factors = factors_of(config, ranks, bias=bias, dtype=dtype, device=DEVICE)
    planes = random_latents(factors, lengths, DEVICE)
    batch = batch_of(lengths, 1, DEVICE)
    q = random(len(lengths), heads, dim).to(dtype)
    expected = ReferenceAttention().attend(q, *rebuilt(config, factors, planes, batch), batch)
    kernels, _ = made_of(config)
    got = kernels.decode(q, planes, batch, factors)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)
    again = kernels.decode(q, planes, batch, factors)  # reuses the buffers of partial results
    assert torch.equal(got, again)
    alone = [
        kernels.decode(q[n : n + 1], planes, part, factors)
        for n, part in enumerate(each_alone(batch))
    ]
    torch.testing.assert_close(torch.cat(alone), got, rtol=TOLERANCE, atol=TOLERANCE)


def each_alone(batch: Batch) -> list[Batch]:
    """Return batches of one sequence each."""
    return [
        replace(
            batch,
            page_table=batch.page_table[n : n + 1],
            lengths=batch.lengths[n : n + 1],
            starts=batch.starts[:2],
            sequences=batch.sequences[:1],
            tokens=batch.tokens[n : n + 1],
            positions=batch.positions[n : n + 1],
        )
        for n in range(len(batch.lengths))
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_model_matches_dense_kv(packed: bool) -> None:
    """Logits of prompts in chunks, of a mixed batch, and of decode steps, with ragged ranks."""
    config = replace(TINY, head_dim=32, num_layers=2)
    checkpoint = tiny_checkpoint(config=config, ranks=(9, 13, 11, None, 12, None, 24), bias=True)
    found = []
    for kv_format in ("dense", "lowrank"):
        if packed:
            model: Model = build_gemm_model(checkpoint, device=DEVICE, kv_format=kv_format)
        else:
            model = build_model(checkpoint, device=DEVICE, kv_format=kv_format)
        found.append(chunks_and_steps(model))
    dense, lowrank = found
    assert not torch.equal(dense, lowrank)
    tolerance = 0.04 if packed else 0.02  # packed layers compute in bf16
    limit = tolerance * float(dense.abs().max())
    torch.testing.assert_close(lowrank, dense, rtol=0, atol=limit)


def chunks_and_steps(model: Model) -> Tensor:
    """Return the logits of two sequences: their prompts in two chunks, then three decode steps.

    The second chunk of the second prompt is computed with the first decode step of the first one.
    """
    cache = model.new_cache(PageCount(9))
    first, second = list(prompt_of(40)), list(prompt_of(70, 1))
    pages = [5, 1, 7], [0, 3, 2, 8, 4]

    def run(*slices: SequenceSlice) -> Tensor:
        return model.forward(Batch.of(slices, DEVICE), cache)

    found = [
        run(SequenceSlice(first[:37], 0, pages[0]), SequenceSlice(second[:30], 0, pages[1])),
        run(SequenceSlice(first[37:38], 37, pages[0]), SequenceSlice(second[30:68], 30, pages[1])),
    ]
    found += [
        run(
            SequenceSlice([first[38 + n]], 38 + n, pages[0]),
            SequenceSlice([second[68 + n]], 68 + n, pages[1]),
        )
        for n in range(2)
    ]
    return torch.cat(found)
