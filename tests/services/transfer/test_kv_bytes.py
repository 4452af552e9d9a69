"""Compression ratios on the wire: bytes of the frames of a prompt's segments."""

from collections.abc import Mapping

import pytest
import torch

import codec
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.format import KVFormat
from runtime.offline.bench.kv_bytes import formats, one_layer
from services.transfer.codecs import SegmentCodecs
from services.transfer.frame import HEADER_BYTES
from services.transfer.manifest import plan_segments
from services.transfer.policy import WireMode

TOKENS, SLOT_BYTES = 8192, 4 << 20
CONFIG = one_layer()


@pytest.fixture(scope="module")
def found() -> Mapping[str, KVFormat]:
    return formats(CONFIG)


def wire_bytes(kv_format: KVFormat) -> int:
    """Encode the segments of a prompt of one layer raw; return the bytes of all frames."""
    layout = CacheLayout.of(kv_format, num_layers=1, page_size=16)
    pages = layout.plan.pages(TOKENS)
    cache = PagedCache(layout, layout.plan.each(pages))
    codecs = SegmentCodecs(layout, {})
    slot = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
    total = 0
    for plan in plan_segments(
        layout,
        first_token=0,
        num_tokens=TOKENS,
        page_tables=[tuple(range(pages))] * len(layout.plan.groups),
        capacity=SLOT_BYTES,
        bound=codecs.max_frame_bytes,
    ):
        encoder = codecs.of(cache.tensors, plan.extent, WireMode.RAW)
        room = slot[HEADER_BYTES:]
        segment = codec.EncodeSegment(plan.pages, plan.extent.num_tokens, 0, len(room))
        encoded = encoder.encode_batch([segment], room)[0].result()
        assert encoded.raw_bytes == codecs.raw_bytes(plan.extent)
        header = codec.read_header(room[: encoded.length])
        assert header is not None
        total += HEADER_BYTES + encoded.length
    return total


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("dense", 0.99),
        ("lowrank, keep 0.6", 2.04),
        ("fp8", 1.94),
        ("int4", 3.6),
        ("k4v2", 4.75),
        ("fdc, rank 64", 1.95),
        ("shard", 9.75),
    ],
)
def test_ratio_of_8k_tokens_on_the_wire(
    found: Mapping[str, KVFormat], name: str, ratio: float
) -> None:
    dense = TOKENS * 2 * 2 * CONFIG.num_kv_heads * CONFIG.head_dim
    size = wire_bytes(found[name])
    assert dense / size >= ratio
