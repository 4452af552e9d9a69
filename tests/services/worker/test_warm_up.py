"""Warm-up of the codec, on the CPU."""

from dataclasses import replace

import pytest
import torch

import codec
from runtime.pages.plan import PAGE_SIZE, pages_for
from runtime.pages.sent import SentTokens
from services.transfer.manifest import plan_segments
from services.transfer.policy import WireMode
from services.transfer.slab import Slab
from services.worker.codec_warm_up import _kinds_of_segments, warm_up_codec
from tests.runtime.tiny import CONFIG
from tests.services.workers import CHUNK, SLOT_BYTES, load, with_sizes


@pytest.mark.parametrize(
    ("codebooks", "slot_bytes", "kinds"),
    [(False, 6000, 2), (True, 6000, 2), (True, SLOT_BYTES, 1)],
)
def test_warm_up_covers_all_kinds_of_segments_and_keeps_the_pages(
    codebooks: bool, slot_bytes: int, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(codebooks=codebooks)
    planes = loaded.rank.executor.cache.planes
    for plane in planes:
        plane.normal_()
    kept = [plane.clone() for plane in planes]
    made: list[tuple[int, bool]] = []
    paged = codec.paged

    def watched(planes: list[torch.Tensor], books: list[codec.Codebook | None]) -> codec.PagedCodec:
        made.append((len(planes), any(books)))
        return paged(planes, books)

    monkeypatch.setattr(codec, "paged", watched)
    assert warm_up_codec(loaded.rank, Slab(1, slot_bytes)) == kinds
    assert len(made) == kinds * (len(WireMode) if codebooks else 1)
    assert max(count for count, _ in made) == 2 * CONFIG.num_layers
    assert any(coded for _, coded in made) is codebooks
    assert all(torch.equal(plane, was) for plane, was in zip(planes, kept, strict=True))


def test_warm_up_of_another_rank_uses_its_kv_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = load().rank
    shape = rank.executor.shape
    rank.executor.shape = replace(shape, config=replace(shape.config, first_kv_head=6))
    heads: set[int] = set()
    paged = codec.paged

    def watched(planes: list[torch.Tensor], books: list[codec.Codebook | None]) -> codec.PagedCodec:
        heads.update(plane.shape[1] for plane in planes)
        return paged(planes, books)

    monkeypatch.setattr(codec, "paged", watched)
    assert warm_up_codec(rank, Slab(1, SLOT_BYTES)) == 1
    assert heads == {CONFIG.num_kv_heads}


def test_serving_uses_the_codecs_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(codebooks=True)
    warm_up_codec(loaded.rank, Slab(1, SLOT_BYTES))

    def refused(*_: object) -> codec.PagedCodec:
        raise AssertionError("a codec was created while serving")

    monkeypatch.setattr(codec, "paged", refused)
    cache = loaded.rank.executor.cache
    plans = plan_segments(
        cache.layout,
        first_token=0,
        num_tokens=CHUNK // 2,
        page_tables=(tuple(range(CHUNK // 2 // PAGE_SIZE)),),
        capacity=SLOT_BYTES,
        bound=loaded.rank.codecs.max_frame_bytes,
    )
    codecs = [
        loaded.rank.codecs.of(cache.tensors, plan.extent, m) for plan in plans for m in WireMode
    ]
    assert len(codecs) == len(WireMode)


@pytest.mark.parametrize("fitting", [16, 64, 96, 112, 113, 128, 4096])
def test_warm_up_has_the_longest_segments_of_compressed_prompts(fitting: int) -> None:
    """``fitting``: tokens of all layers of the widest compressed planes that fit a slot."""
    loaded = load(kv_format="int4")
    chunk = 8 * PAGE_SIZE
    limits = replace(loaded.rank.sizes.limits, step_tokens=chunk, chunk_tokens=chunk)
    loaded = with_sizes(loaded, replace(loaded.rank.sizes, limits=limits))
    layout, bound = loaded.rank.executor.cache.layout, loaded.rank.codecs.max_frame_bytes
    capacity = max(loaded.rank.codecs.min_slot_bytes, bound(1, CONFIG.num_layers, fitting))
    prepared = {
        (plan.extent.plane_group, plan.extent.num_layers): pages_for(
            plan.extent.num_tokens, PAGE_SIZE
        )
        for plan in _kinds_of_segments(loaded.rank, capacity)
    }
    for tokens in range(1, 420, 7):
        for first in range(0, tokens, chunk):
            count = min(chunk, tokens - first)
            pages = tuple(range(pages_for(first + count, PAGE_SIZE)))
            for plan in plan_segments(
                layout,
                first_token=first,
                num_tokens=count,
                page_tables=(pages[first // PAGE_SIZE :],) * 2,
                sent=SentTokens.whole(layout.plan, tokens),
                capacity=capacity,
                bound=bound,
            ):
                kind = plan.extent.plane_group, plan.extent.num_layers
                assert prepared[kind] >= pages_for(plan.extent.num_tokens, PAGE_SIZE)
