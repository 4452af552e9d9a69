"""Encoding of pages in several layers by one launch, compared with one launch for each layer."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.config import ModelConfig
from runtime.kv.fdc import FdcFormat
from runtime.kv.gpu import CompressedPageKernels
from runtime.kv.layers_encoder import LayersEncoder
from runtime.kv.palu import PaluFormat
from runtime.kv.quantized import QuantizedFormat
from runtime.kv.registry import COMPRESSED
from runtime.kv.shard import ShardFormat
from runtime.offline.bench.kv_formats import random_fdc, random_palu, random_shard
from runtime.pages.window import WINDOW
from tests.runtime.device import DEVICE
from tests.runtime.kv.compressed_data import (
    PAGE,
    SMOLLM2_135M,
    compressed_planes,
    gaussian,
    same_bits,
)

pytestmark = [pytest.mark.triton, pytest.mark.long]

SMALL = replace(SMOLLM2_135M, num_heads=4, num_kv_heads=2, num_layers=2)
"""4 query heads, 2 KV heads of 64."""
Layer = tuple[CompressedPageKernels, tuple[Tensor, ...]]


def exact(config: ModelConfig, seed: int) -> tuple[Tensor, Tensor]:
    return gaussian(config, 6, seed).to(DEVICE), gaussian(config, 6, seed + 1).to(DEVICE)


def calibrated_layers(kv_format: FdcFormat | PaluFormat | ShardFormat, seed: int) -> list[Layer]:
    layers: list[Layer] = []
    for index in range(SMALL.num_layers):
        kernels = kv_format.layer(index).kernels(DEVICE)
        assert kernels is not None
        planes = compressed_planes(kv_format, 5, layer=index, device=DEVICE)
        layers.append((kernels, (*exact(SMALL, seed + 2 * index), *planes)))
    return layers


def layers_of(name: str) -> list[Layer]:
    """Return layers of a format; those of `fdc` have planes of two different widths."""
    if name == "fdc":
        first, second = (random_fdc(SMALL, ranks, DEVICE) for ranks in ((32, 16), (48, 32)))
        return calibrated_layers(first, 0) + calibrated_layers(second, 4)
    if name == "palu":
        return calibrated_layers(random_palu(SMALL, (32, 48), DEVICE, group_heads=2), 0)
    if name == "shard":
        return calibrated_layers(random_shard(SMALL, device=DEVICE), 0)
    kv_format = COMPRESSED[name](SMALL)
    assert isinstance(kv_format, QuantizedFormat)
    stored = [compressed_planes(kv_format, 5, device=DEVICE) for _ in range(3)]
    kernels = kv_format.kernels(DEVICE)
    assert kernels is not None
    return [(kernels, (*exact(SMALL, 2 * index), *planes)) for index, planes in enumerate(stored)]


def copies(layers: list[Layer]) -> list[tuple[Tensor, ...]]:
    """Return copies of the planes of each layer."""
    return [tuple(plane.clone() for plane in planes) for _, planes in layers]


@pytest.mark.parametrize("name", ["fp8", "int4", "k4v2", "stream4", "fdc", "palu", "shard"])
def test_layers_have_the_bits_of_encoding_each_alone(name: str) -> None:
    layers = layers_of(name)
    pages = [[5, 0, 2], [1, 3, 0], [16, 160, 48]]
    sources, targets, first = (torch.tensor(ids, device=DEVICE) for ids in pages)
    before, alone = copies(layers), copies(layers)
    for (kernels, _), (k, v, *planes) in zip(layers, alone, strict=True):
        kernels.encode(k, v, tuple(planes), targets, sources, first)
    LayersEncoder(layers).encode(sources, targets, first)
    for (_, found), expected, old in zip(layers, alone, before, strict=True):
        assert same_bits(found, expected)
        assert not same_bits(found, old)


@pytest.mark.parametrize("name", ["int4", "fdc", "shard"])
def test_leaving_pages_of_all_layers_have_the_bits_of_each_alone(name: str) -> None:
    layers = layers_of(name)
    batch = Batch.static(2, 6, DEVICE)
    tables = torch.tensor([[[5, 0, 2, 1, 3, 4], [3, 1, 4, 0, 2, 5]], [[0, 1, 2, 3, 4, 0]] * 2])
    page_tables = tuple(tables.int().to(DEVICE))
    lengths = torch.tensor([WINDOW + 2 * PAGE, WINDOW + 2 * PAGE + 3], device=DEVICE).int()
    batch = replace(batch, page_table=page_tables[0], page_tables=page_tables, lengths=lengths)
    before, alone = copies(layers), copies(layers)
    for (kernels, _), planes in zip(layers, alone, strict=True):
        kernels.encode_leaving(planes, batch)
    LayersEncoder(layers).encode_leaving(batch)
    for (_, found), expected, old in zip(layers, alone, before, strict=True):
        assert same_bits(found, expected)
        assert not same_bits(found, old)


def test_encoding_no_pages_changes_nothing() -> None:
    layers = layers_of("int4")
    before = copies(layers)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    LayersEncoder(layers).encode(none, none, none)
    assert all(same_bits(*pair) for pair in zip((x for _, x in layers), before, strict=True))


def test_layers_with_other_alignment_are_encoded() -> None:
    first, (kernels, planes), *_ = layers_of("int4")
    *others, last = planes
    moved = torch.zeros(len(last) * last.stride(0) + 1, dtype=last.dtype, device=DEVICE)
    own = moved.as_strided(last.shape, last.stride(), 1)
    ids = torch.tensor([0, 3], device=DEVICE)
    encoder = LayersEncoder([first, (kernels, (*others, own))])
    assert len(encoder._launches) == 2
    encoder.encode(ids, ids, 16 * ids)
    expected = tuple(torch.zeros_like(plane) for plane in planes[2:])
    kernels.encode(planes[0], planes[1], expected, ids, ids, 16 * ids)
    assert torch.equal(own[ids], expected[-1][ids])
