"""Segments of any plane group are bitwise identical after decoding, in SplitZip and raw mode."""

from collections.abc import Sequence

import pytest
import torch

import codec
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.format import Plane
from runtime.pages.plan import PageCount
from services.transfer.codecs import Books, SegmentCodecs
from services.transfer.extent import Extent
from services.transfer.frame import HEADER_BYTES
from services.transfer.policy import WireMode
from tests.services.workers import normal_codebook

HEADS, PAGE, LAYERS, TOKENS = 3, 16, 2, 40
BOOK = normal_codebook()


def plane(name: str, dtype: torch.dtype, dim: int, *, encodable: bool = False) -> Plane:
    return Plane(name, dtype, (HEADS, PAGE, dim), encodable)


def codecs_of(planes: Sequence[Plane], books: Books) -> tuple[SegmentCodecs, PagedCache]:
    layout = CacheLayout(PAGE, HEADS, (tuple(planes),) * LAYERS)
    cache = PagedCache(layout, PageCount(6))
    generator = torch.Generator().manual_seed(0)
    for each in cache.planes:
        each.view(torch.uint8).random_(0, 256, generator=generator)
    return SegmentCodecs(layout, books), cache


@pytest.mark.parametrize("mode", WireMode)
@pytest.mark.parametrize("heads", [(0, HEADS), (1, 2), (2, 1)])
@pytest.mark.parametrize(
    "found",
    [
        plane("k", torch.bfloat16, 8, encodable=True),
        plane("codes", torch.int8, 8),
        plane("codes", torch.uint8, 5),
        plane("scales", torch.float32, 1),
        plane("offsets", torch.int64, 3),
    ],
    ids=lambda p: f"{p.dtype}-{p.shape[-1]}",
)
def test_planes_of_any_dtype_arrive_bit_for_bit(
    found: Plane, heads: tuple[int, int], mode: WireMode
) -> None:
    codecs, cache = codecs_of([found], {(layer, "k"): BOOK for layer in range(LAYERS)})
    extent = Extent(0, TOKENS, 0, LAYERS, *heads)
    slot = torch.empty(codecs.max_frame_bytes(0, LAYERS, TOKENS) - HEADER_BYTES, dtype=torch.uint8)
    segment = codec.EncodeSegment((5, 0, 3), TOKENS, 0, len(slot))
    encoded = codecs.of(cache.tensors, extent, mode).encode_batch([segment], slot)[0].result()
    assert encoded.raw_bytes == codecs.raw_bytes(extent)
    payload = slot[: encoded.length]
    header = codec.read_header(payload)
    coded = found.encodable and mode is WireMode.SPLITZIP
    assert any(entry.mode for entry in header.planes) == coded

    reader, landed = codecs_of([found], {(layer, "k"): BOOK for layer in range(LAYERS)})
    for each in landed.planes:
        each.zero_()
    written = codec.DecodeSegment(
        (1, 2, 4), TOKENS, 0, encoded.length, encoded.checksum, mode is WireMode.RAW
    )
    reader.of(landed.tensors, extent).decode_batch([written], slot)[0].result()
    first, count = heads
    for mine, theirs in zip(landed.planes, cache.planes, strict=True):
        expected = torch.zeros_like(mine)
        chosen = slice(first, first + count)
        for source, target, slots in ((5, 1, PAGE), (0, 2, PAGE), (3, 4, TOKENS - 2 * PAGE)):
            expected[target, chosen, :slots] = theirs[source, chosen, :slots]
        assert mine.view(torch.uint8).equal(expected.view(torch.uint8))


def test_escapes_count_only_planes_with_a_codebook() -> None:
    planes = [plane(name, torch.bfloat16, 8, encodable=True) for name in ("k", "v")]
    codecs, _ = codecs_of(planes, {(0, "k"): BOOK})
    extent = Extent(0, TOKENS, 0, LAYERS, 0, HEADS)
    escapes = codecs.escapes(extent, 7)
    assert (escapes.elements, escapes.found) == (HEADS * TOKENS * 8, 7)
    assert escapes.expected_rate == BOOK.escape_rate


def test_codebook_of_a_raw_plane_is_ignored() -> None:
    codecs, _ = codecs_of([plane("codes", torch.int8, 8)], {(0, "codes"): BOOK})
    assert not codecs.has_codebooks


def test_encodable_plane_of_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(codec.UnsupportedDtype, match="float32"):
        codecs_of([plane("k", torch.float32, 8, encodable=True)], {})
