"""Ranks of a worker store their KV heads as a worker of one rank stores them, bit for bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.errors import CalibrationError, KVFormatError
from runtime.kv import palu
from runtime.kv.calibration import Artifact
from runtime.kv.compressed import CompressedFormat
from runtime.kv.kvquant import CodeOptions, quantize_latents
from runtime.kv.registry import COMPRESSED, create_format, from_artifact
from runtime.kv.windowed import compressed_cache
from runtime.offline.bench.kv_formats import fdc_artifact, palu_artifact, shard_artifact
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.kv.compressed_data import PAGE, gaussian
from tests.runtime.kv.lowrank import CONFIG
from tests.runtime.kv.quantized import calibration, moments

Create = Callable[[ModelConfig], CompressedFormat]

PAGES = 3
SIZES = (2, 3, 6)
"""Numbers of ranks: even, uneven, and more than KV heads."""
FDC_RANKS = (16, 48, 32, 16, 32, 16, 16, 64)


def palu_in_pairs() -> Artifact:
    made = palu.calibrate(moments(), palu.PaluOptions(rank=48, group_heads=2), "")
    return quantize_latents(made, palu.PaluFormat(CONFIG, made), moments(), CodeOptions())


ARTIFACTS: dict[str, tuple[str, Callable[[], Artifact]]] = {
    "fdc": ("fdc", lambda: fdc_artifact(CONFIG, FDC_RANKS)),
    "palu": ("palu", lambda: palu_artifact(CONFIG, (48, 32), 1)),
    "palu-pairs": ("palu", lambda: palu_artifact(CONFIG, (48, 32), 2)),
    "palu-all": ("palu", lambda: palu_artifact(CONFIG, (48, 32), 4)),
    "shard": ("shard", lambda: shard_artifact(CONFIG)),
    "kvquant": ("kvquant", lambda: calibration("kvquant", bits=3, v_outliers=1)),
    "kvquant-before": ("kvquant", lambda: calibration("kvquant-before")),
    "fdc+kvquant": ("fdc", lambda: calibration("fdc")),
    "palu+kvquant": ("palu", palu_in_pairs),
}
"""Calibrations of a model with four KV heads, with the names of their formats."""


def creator_of(name: str) -> Create:
    if name in COMPRESSED:
        return COMPRESSED[name]
    kind, make = ARTIFACTS[name]
    artifact = make()
    return lambda config: from_artifact(kind, artifact, config)


def configs(size: int, scheme: Scheme = Scheme.LOW_RANK) -> list[ModelConfig]:
    """Return the config of each rank."""
    return [Partition.of(CONFIG, rank, size, scheme).config_of(CONFIG) for rank in range(size)]


def encoded(kv_format: CompressedFormat, layer: int, keys: Tensor, values: Tensor) -> list[Tensor]:
    """Return the compressed planes of pages, as bytes, and the decoded K and V."""
    planes = compressed_cache(kv_format.planes(layer, PAGE), PAGES).layer(0)
    pages, own = torch.arange(PAGES), kv_format.layer(layer)
    own.encode(keys, values, (1 + pages) * PAGE, planes, pages)
    decoded = own.decode(planes, pages, (1 + pages) * PAGE)
    return [x.contiguous().view(torch.uint8) for x in (*planes, *decoded)]


def assert_ranks_store_their_heads(name: str, size: int, scheme: Scheme) -> None:
    create = creator_of(name)
    whole = create(CONFIG)
    keys, values = gaussian(CONFIG, PAGES, 1), gaussian(CONFIG, PAGES, 2)
    for layer in range(CONFIG.num_layers):
        expected = encoded(whole, layer, keys, values)
        for config in configs(size, scheme):
            own = slice(config.kv_heads.start, config.kv_heads.stop)
            of_rank = create(config)
            assert (of_rank.name, of_rank.version) == (whole.name, whole.version)
            assert of_rank.artifact_hash == whole.artifact_hash
            found = encoded(of_rank, layer, keys[:, own], values[:, own])
            for mine, all_heads in zip(found, expected, strict=True):
                assert mine.equal(all_heads[:, own])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "name", [*COMPRESSED, "fdc", "palu", "kvquant", "kvquant-before", "fdc+kvquant"]
)
def test_ranks_store_their_kv_heads_as_one_rank_does(name: str, size: int) -> None:
    assert_ranks_store_their_heads(name, size, Scheme.LOW_RANK)


@pytest.mark.parametrize("name", ["palu-pairs", "palu+kvquant"])
def test_ranks_with_whole_groups_of_kv_heads_store_them_as_one_rank_does(name: str) -> None:
    assert_ranks_store_their_heads(name, 2, Scheme.LOW_RANK)


@pytest.mark.parametrize("name", ["shard", "palu-all"])
def test_ranks_with_all_kv_heads_store_them_as_one_rank_does(name: str) -> None:
    assert_ranks_store_their_heads(name, 2, Scheme.BASE)


@pytest.mark.parametrize(("name", "size"), [("palu-all", 2), ("palu-pairs", 3), ("palu-pairs", 6)])
def test_ranks_with_a_part_of_a_group_of_kv_heads_are_refused(name: str, size: int) -> None:
    create = creator_of(name)
    refused = r"KV format palu stores K of groups of . KV heads together.*smaller --group-heads"
    for config in configs(size):
        if len(config.kv_heads) % 2 or name == "palu-all":
            with pytest.raises(KVFormatError, match=refused):
                create(config)


def test_a_basis_of_all_kv_heads_is_refused_by_ranks_with_some_of_them() -> None:
    for config in configs(2):
        with pytest.raises(KVFormatError, match=r"K of all 4 KV heads together.*has only 2"):
            creator_of("shard")(config)


@pytest.mark.parametrize("name", ["fdc", "palu", "shard", "kvquant"])
def test_calibrations_of_more_kv_heads_than_the_model_has_are_refused(name: str) -> None:
    smaller = replace(CONFIG, num_kv_heads=2)
    for config in (smaller, Partition.of(smaller, 0, 2, Scheme.BASE).config_of(smaller)):
        with pytest.raises(CalibrationError, match=r"this model needs|does not fit"):
            creator_of(name)(config)


@pytest.mark.parametrize("size", SIZES)
def test_dense_planes_have_the_kv_heads_of_the_rank(size: int) -> None:
    for config in configs(size):
        made = create_format("dense", config, torch.device("cpu"), torch.float32)
        assert [plane.shape[0] for plane in made.planes(0, PAGE)] == [len(config.kv_heads)] * 2


def test_all_ranks_have_fused_kernels_or_none() -> None:
    """The kernels need ranks that are multiples of 16; here, those of one head are not."""
    narrow = replace(CONFIG, head_dim=40)
    for first, is_fused in ((32, True), (40, False)):
        artifact = fdc_artifact(narrow, (first, 32, 32, 32, 32, 32, 32, 32))
        for size in (1, 2):
            parts = [Partition.of(narrow, rank, size).config_of(narrow) for rank in range(size)]
            assert {from_artifact("fdc", artifact, part).fused for part in parts} == {is_fused}
