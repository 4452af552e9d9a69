"""Planned segments fit a slot, and a sequence is complete if each part arrived exactly once."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.kv.cache import CacheLayout
from runtime.kv.compressed import COMPRESSED, FULL_PRECISION
from runtime.kv.format import Plane
from runtime.pages.plan import pages_for
from runtime.pages.window import SINK_PAGES, first_recent
from services.transfer.errors import ForeignSegment
from services.transfer.extent import Extent
from services.transfer.manifest import Coverage, SegmentPlan, plan_segments

PAGE, HEADS = 16, 4
WIDE = Plane("k", torch.bfloat16, (HEADS, PAGE, 8))
NARROW = Plane("scale", torch.float32, (HEADS, PAGE, 1), encodable=False)


def layout_of(num_layers: int, *planes: Plane) -> CacheLayout:
    return CacheLayout(PAGE, HEADS, (planes or (WIDE,),) * num_layers)


def extent_of(
    first_token: int, num_tokens: int, first_layer: int, num_layers: int, **changes: int
) -> Extent:
    heads = {"first_kv_head": 0, "num_kv_heads": HEADS}
    return Extent(first_token, num_tokens, first_layer, num_layers, **{**heads, **changes})


def _bound(group: int, layers: int, tokens: int) -> int:
    return 100 + 48 * layers + 500 * layers * tokens // (group + 1)


def _plan(num_tokens: int, layout: CacheLayout, capacity: int, first: int = 0) -> list[SegmentPlan]:
    pages = tuple(range(1000, 1000 - (-num_tokens // PAGE)))
    return list(
        plan_segments(
            layout,
            first_token=first,
            num_tokens=num_tokens,
            pages=pages,
            capacity=capacity,
            bound=_bound,
        )
    )


@given(
    num_tokens=st.integers(1, 400),
    num_layers=st.integers(1, 40),
    slack=st.integers(0, 400_000),
    first_page=st.integers(0, 5),
    groups=st.integers(1, 2),
)
def test_planned_segments_fit_and_cover_the_chunk_once(
    num_tokens: int, num_layers: int, slack: int, first_page: int, groups: int
) -> None:
    capacity = _bound(0, 1, min(PAGE, num_tokens)) + slack
    first = first_page * PAGE
    layout = layout_of(num_layers, *(WIDE, NARROW)[:groups])
    coverage = Coverage(first + num_tokens, layout)
    for group in range(groups if first else 0):
        coverage.add(extent_of(0, first, 0, num_layers, plane_group=group))
    for plan in _plan(num_tokens, layout, capacity, first):
        extent = plan.extent
        assert _bound(extent.plane_group, extent.num_layers, extent.num_tokens) <= capacity
        assert plan.pages == tuple(1000 + at - first_page for at in coverage.add(extent))
    assert coverage.complete


FULL = replace(WIDE, group=FULL_PRECISION)
STORED = (
    Plane("codes", torch.uint8, (HEADS, PAGE, 4), encodable=False, group=COMPRESSED),
    Plane("scale", torch.float32, (HEADS, PAGE, 1), encodable=False, group=COMPRESSED),
    Plane("latents", torch.bfloat16, (HEADS, PAGE, 4), group=COMPRESSED),
)


@given(tokens=st.integers(1, 500), chunk=st.integers(1, 12), slack=st.integers(0, 200_000))
def test_every_page_is_sent_either_exact_or_stored(tokens: int, chunk: int, slack: int) -> None:
    layout = layout_of(3, FULL, *STORED)
    capacity = _bound(0, 1, min(PAGE, tokens)) + slack
    recent = first_recent(tokens, PAGE)
    coverage = Coverage(tokens, layout)
    for first in range(0, tokens, chunk * PAGE):
        count = min(chunk * PAGE, tokens - first)
        pages = range(first // PAGE, pages_for(first + count, PAGE))
        plans = plan_segments(
            layout,
            first_token=first,
            num_tokens=count,
            pages=tuple(1000 + page for page in pages),
            capacity=capacity,
            bound=_bound,
            stored=tuple(2000 + page for page in pages if SINK_PAGES <= page < recent),
            sequence_tokens=tokens,
        )
        for plan in plans:
            assert not coverage.complete
            stored = layout.groups[plan.extent.plane_group].stored
            arrived = coverage.add(plan.extent)
            assert plan.pages == tuple((2000 if stored else 1000) + page for page in arrived)
            assert all((SINK_PAGES <= page < recent) is stored for page in arrived)
    assert coverage.complete


def test_few_exact_pages_of_a_chunk_are_one_segment() -> None:
    layout = layout_of(4, FULL, *STORED)
    tokens, window = 64 * PAGE, 64 * PAGE - first_recent(64 * PAGE, PAGE) * PAGE
    plans = plan_segments(
        layout,
        first_token=PAGE,
        num_tokens=tokens - PAGE,
        pages=tuple(range(63)),
        capacity=_bound(0, 4, window),
        bound=_bound,
        stored=tuple(range(63)),
        sequence_tokens=tokens,
    )
    assert [plan.extent.num_layers for plan in plans if not plan.extent.plane_group] == [4]


def test_page_of_the_other_kind_is_refused() -> None:
    layout = layout_of(1, FULL, *STORED)
    coverage = Coverage(200, layout)
    for page, group in ((0, 1), (1, 0), (7, 0), (8, 1), (12, 2)):
        with pytest.raises(ForeignSegment, match="are not sent in plane group"):
            coverage.add(
                extent_of(page * PAGE, min(PAGE, 200 - page * PAGE), 0, 1, plane_group=group)
            )
    with pytest.raises(ForeignSegment, match="are not sent in plane group 0"):
        coverage.add(extent_of(0, 200, 0, 1))


def test_part_of_the_kv_heads_of_a_block_is_refused() -> None:
    layout = layout_of(1, FULL, *STORED)
    latents, block = 1, 2
    assert [group.is_block for group in layout.groups] == [False, False, True]
    coverage = Coverage(200, layout)
    coverage.add(extent_of(PAGE, PAGE, 0, 1, plane_group=latents, num_kv_heads=1))
    with pytest.raises(ForeignSegment, match="all KV heads"):
        coverage.add(extent_of(PAGE, PAGE, 0, 1, plane_group=block, num_kv_heads=1))
    coverage.add(extent_of(PAGE, PAGE, 0, 1, plane_group=block))


def test_planned_segments_skip_layers_without_planes_of_the_group() -> None:
    layout = CacheLayout(PAGE, HEADS, ((WIDE,), (NARROW,), (WIDE, NARROW), (WIDE,)))
    plans = _plan(PAGE, layout, capacity=1 << 20)
    found = [(p.extent.plane_group, p.extent.first_layer, p.extent.num_layers) for p in plans]
    assert found == [(0, 0, 1), (0, 2, 2), (1, 1, 2)]
    coverage = Coverage(PAGE, layout)
    for plan in plans:
        assert not coverage.complete
        coverage.add(plan.extent)
    assert coverage.complete
    with pytest.raises(ForeignSegment, match="no planes of group 1"):
        Coverage(PAGE, layout).add(extent_of(0, PAGE, 0, 2, plane_group=1))


def test_slot_too_small_for_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold one page"):
        _plan(17, layout_of(2), capacity=_bound(0, 1, PAGE) - 1)


@pytest.mark.parametrize(
    "extent",
    [
        extent_of(8, 16, 0, 1),  # not on a page boundary
        extent_of(0, 20, 0, 1),  # ends inside a page that is not the last
        extent_of(32, 16, 0, 1),  # past the end
        extent_of(0, 0, 0, 1),
        extent_of(0, 16, 3, 2),  # one layer too many
        extent_of(0, 16, 0, 0),
        extent_of(0, 16, 0, 4, plane_group=1),
        extent_of(0, 16, 0, 4, rank=1),
        extent_of(0, 16, 0, 4, num_kv_heads=0),
        extent_of(0, 16, 0, 4, first_kv_head=1),  # one KV head too many
        extent_of(16, 16, 0, 4),  # has arrived already
        extent_of(16, 16, 2, 1, first_kv_head=3, num_kv_heads=1),
    ],
)
def test_segment_outside_the_sequence_is_refused(extent: Extent) -> None:
    coverage = Coverage(40, layout_of(4))
    coverage.add(extent_of(16, 16, 2, 1))
    with pytest.raises(ForeignSegment):
        coverage.add(extent)


def test_refused_segment_claims_nothing() -> None:
    coverage = Coverage(32, layout_of(2))
    coverage.add(extent_of(16, 16, 1, 1))
    with pytest.raises(ForeignSegment):
        coverage.add(extent_of(0, 32, 0, 2))
    coverage.add(extent_of(0, 16, 0, 2))
    coverage.add(extent_of(16, 16, 0, 1))
    assert coverage.complete


def test_sequence_is_complete_with_all_kv_heads() -> None:
    coverage = Coverage(PAGE, layout_of(1), ranks=2)
    coverage.add(extent_of(0, PAGE, 0, 1, first_kv_head=0, num_kv_heads=2, rank=0))
    assert not coverage.complete
    overlapping = extent_of(0, PAGE, 0, 1, first_kv_head=1, num_kv_heads=2, rank=1)
    with pytest.raises(ForeignSegment, match="arrived twice"):
        coverage.add(overlapping)
    coverage.add(extent_of(0, PAGE, 0, 1, first_kv_head=2, num_kv_heads=2, rank=1))
    assert coverage.complete
