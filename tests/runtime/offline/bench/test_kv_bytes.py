"""Compression ratios of sequences as the allocator and the cache give out pages and bytes."""

from collections.abc import Mapping

import pytest
import torch

from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.format import KVFormat
from runtime.offline.bench import kv_bytes
from runtime.offline.bench.kv_bytes import formats, occupation, occupied, one_layer
from tests.runtime.pages.plans import compressed_plan
from tests.runtime.tiny import pages_of

CONFIG = one_layer()


@pytest.fixture(scope="module")
def found() -> Mapping[str, KVFormat]:
    return formats(CONFIG)


@pytest.mark.parametrize(
    ("name", "sequence", "stored_token"),
    [
        ("lowrank, keep 0.6", 2.06, 1.0),
        ("fp8", 1.94, 1.98),
        ("fp8-e5m2", 1.94, 1.98),
        ("int4", 3.6, 3.76),
        ("k4v2", 4.75, 5.0),
        ("stream8", 1.93, 1.96),
        ("stream4", 3.7, 3.87),
        ("stream4-qjl", 3.3, 3.41),
        ("fdc, rank 64", 1.95, 2.0),
        ("palu, rank 64", 1.95, 2.0),
        ("shard", 9.75, 11.1),
    ],
)
@pytest.mark.parametrize("decoded", [0, 1])
def test_ratio_of_8k_tokens_with_sinks_and_window(
    found: Mapping[str, KVFormat], name: str, sequence: float, stored_token: float, decoded: int
) -> None:
    assert occupation(found[name], CONFIG, 8192, decoded).ratio >= sequence
    assert kv_bytes.per_compressed_token(found[name], CONFIG) >= stored_token


def test_shard_stores_decoded_tokens_like_those_of_the_prompt(
    found: Mapping[str, KVFormat],
) -> None:
    later = occupation(found["shard"], CONFIG, 8192, 2048)
    assert later.ratio >= 9.75 > 5.4
    assert later.pages == (6, 635)
    assert later.tokens == 10_240


def test_dense_has_ratio_one(found: Mapping[str, KVFormat]) -> None:
    assert occupation(found["dense"], CONFIG, 8192).ratio == 1
    assert occupation(found["dense"], CONFIG, 8192, 1).ratio == 8193 / 8208


@pytest.mark.parametrize(
    ("prompt", "decoded", "pages"),
    [
        (8192, 0, (1 + 4, 507)),  # 512 pages
        (8192, 1, (1 + 5, 507)),  # token 8,193 begins page 513
        (8192, 16, (1 + 5, 508)),  # the window has moved by one page
        (80, 0, (5, 0)),
        (96, 0, (5, 1)),
        (16, 0, (1, 0)),
    ],
)
def test_pages_of_a_sequence(prompt: int, decoded: int, pages: tuple[int, int]) -> None:
    assert occupied(compressed_plan(), prompt, decoded) == pages


@pytest.mark.parametrize("name", ["dense", "lowrank, keep 0.6", "int4", "shard"])
def test_bytes_of_pages_are_those_of_allocated_memory(
    found: Mapping[str, KVFormat], name: str
) -> None:
    layout = CacheLayout.of(found[name], num_layers=1, page_size=16)
    cache = PagedCache(layout, pages_of(layout, 5, 3))
    allocated = sum(tensor.untyped_storage().nbytes() for tensor in cache.tensors)
    assert allocated == layout.page_bytes.of(cache.pages)
    assert all(tensor.device == torch.device("cpu") for tensor in cache.planes)


def test_table_has_the_published_ratios_beside_ours() -> None:
    head, *rows = kv_bytes.rows(CONFIG, 2048)
    by_name = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert by_name["Shard, published"]["8192"] == "10.05x"
    assert by_name["shard"]["8192"] == "10.13x"
    assert by_name["k4v2"]["B/token"] == "816"
