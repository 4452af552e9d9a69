"""Planned segments fit a slot, and a sequence is complete if each part arrived exactly once."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.kv.cache import CacheLayout
from runtime.kv.format import Plane
from runtime.pages.groups import PageGroup, Part
from runtime.pages.plan import pages_for
from runtime.pages.sent import SentTokens
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


def coverage_of(tokens: int, layout: CacheLayout, *, split: bool = False) -> Coverage:
    return Coverage(SentTokens.whole(layout.plan, tokens), layout, split=split)


def _bound(group: int, layers: int, tokens: int) -> int:
    return 100 + 48 * layers + 500 * layers * tokens // (group + 1)


def _plan(num_tokens: int, layout: CacheLayout, capacity: int, first: int = 0) -> list[SegmentPlan]:
    pages = tuple(range(1000, 1000 - (-num_tokens // PAGE)))
    return list(
        plan_segments(
            layout,
            first_token=first,
            num_tokens=num_tokens,
            page_tables=[pages] * len(layout.plan.groups),
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
    coverage = coverage_of(first + num_tokens, layout)
    for group in range(groups if first else 0):
        coverage.add(extent_of(0, first, 0, num_layers, plane_group=group))
    for plan in _plan(num_tokens, layout, capacity, first):
        extent = plan.extent
        assert _bound(extent.plane_group, extent.num_layers, extent.num_tokens) <= capacity
        assert plan.pages == tuple(1000 + at - first_page for at in coverage.add(extent))
    assert coverage.complete


SINKS, WINDOW = 1, 64
_ENCODED = PageGroup("encoded", Part.MIDDLE, SINKS, WINDOW)
COMPRESSED = (
    replace(WIDE, group=PageGroup("recent", Part.ENDS, SINKS, WINDOW)),
    Plane("codes", torch.uint8, (HEADS, PAGE, 4), encodable=False, group=_ENCODED),
    Plane("scale", torch.float32, (HEADS, PAGE, 1), encodable=False, group=_ENCODED),
    Plane("latents", torch.bfloat16, (HEADS, PAGE, 4), group=_ENCODED),
)


def first_recent(tokens: int) -> int:
    """Return the index of the first page that is not encoded, after the sinks."""
    return max(SINKS, (tokens - WINDOW) // PAGE)


@given(tokens=st.integers(1, 500), chunk=st.integers(1, 12), slack=st.integers(0, 200_000))
def test_every_page_is_sent_in_one_of_two_groups(tokens: int, chunk: int, slack: int) -> None:
    layout = layout_of(3, *COMPRESSED)
    capacity = _bound(0, 1, min(PAGE, tokens)) + slack
    recent = first_recent(tokens)
    coverage = coverage_of(tokens, layout)
    for first in range(0, tokens, chunk * PAGE):
        count = min(chunk * PAGE, tokens - first)
        pages = range(first // PAGE, pages_for(first + count, PAGE))
        plans = plan_segments(
            layout,
            first_token=first,
            num_tokens=count,
            page_tables=[tuple(start + page for page in pages) for start in (1000, 2000)],
            capacity=capacity,
            bound=_bound,
            sent=SentTokens.whole(layout.plan, tokens),
        )
        for plan in plans:
            assert not coverage.complete
            group = layout.groups[plan.extent.plane_group].page_group
            arrived = coverage.add(plan.extent)
            assert plan.pages == tuple(1000 * (1 + group) + page for page in arrived)
            assert all((SINKS <= page < recent) == group for page in arrived)
    assert coverage.complete


def test_few_pages_of_a_window_are_one_segment() -> None:
    layout = layout_of(4, *COMPRESSED)
    tokens, window = 64 * PAGE, 64 * PAGE - first_recent(64 * PAGE) * PAGE
    plans = plan_segments(
        layout,
        first_token=PAGE,
        num_tokens=tokens - PAGE,
        page_tables=[tuple(range(63))] * 2,
        capacity=_bound(0, 4, window),
        bound=_bound,
        sent=SentTokens.whole(layout.plan, tokens),
    )
    assert [plan.extent.num_layers for plan in plans if not plan.extent.plane_group] == [4]


@given(tokens=st.integers(1, 500), chunk=st.integers(1, 12))
def test_sliding_window_sends_only_the_pages_of_the_last_window(tokens: int, chunk: int) -> None:
    """Layers alternate between full attention and a window. Pages before it are freed."""
    sliding = replace(WIDE, group=PageGroup("window", Part.ENDS, 0, WINDOW))
    layout = CacheLayout(PAGE, HEADS, ((sliding,), (WIDE,)) * 2)
    assert [group.page_group for group in layout.groups] == [0, 1]
    coverage = coverage_of(tokens, layout)
    sent = [set[int](), set[int]()]
    for first in range(0, tokens, chunk * PAGE):
        count = min(chunk * PAGE, tokens - first)
        pages = tuple(layout.plan.span(first, first + count))
        for plan in plan_segments(
            layout,
            first_token=first,
            num_tokens=count,
            page_tables=[pages, pages],
            capacity=1 << 20,
            bound=_bound,
            sent=SentTokens.whole(layout.plan, tokens),
        ):
            assert tuple(coverage.add(plan.extent)) == plan.pages
            sent[plan.extent.plane_group] |= set(plan.pages)
    assert coverage.complete
    last = pages_for(tokens, PAGE)
    assert sent[0] == set(range(max(0, (tokens - WINDOW) // PAGE), last))
    assert sent[1] == set(range(last))
    if tokens - WINDOW >= PAGE:
        with pytest.raises(ForeignSegment, match="are not sent in plane group 0"):
            coverage.add(extent_of(0, PAGE, 0, 1, plane_group=0))


def test_page_of_the_other_group_is_refused() -> None:
    layout = layout_of(1, *COMPRESSED)
    coverage = coverage_of(200, layout)
    for page, group in ((0, 1), (1, 0), (7, 0), (8, 1), (12, 2)):
        with pytest.raises(ForeignSegment, match="are not sent in plane group"):
            coverage.add(
                extent_of(page * PAGE, min(PAGE, 200 - page * PAGE), 0, 1, plane_group=group)
            )
    with pytest.raises(ForeignSegment, match="are not sent in plane group 0"):
        coverage.add(extent_of(0, 200, 0, 1))


def test_segments_have_blocks_or_the_planes_of_blocks() -> None:
    layout = layout_of(2, *COMPRESSED)
    blocks, parts = (
        [n for n, group in enumerate(layout.groups) if group.is_sent(split=split)]
        for split in (False, True)
    )
    assert [layout.groups[n].is_block for n in blocks] == [False, False, True]
    assert [layout.groups[n].in_block for n in parts] == [False, False, True, True]
    for split, groups, others in ((False, blocks, parts), (True, parts, blocks)):
        plans = list(
            plan_segments(
                layout,
                first_token=0,
                num_tokens=200,
                page_tables=[tuple(range(13))] * len(layout.plan.groups),
                capacity=1 << 20,
                bound=_bound,
                split=split,
            )
        )
        assert {plan.extent.plane_group for plan in plans} == set(groups)
        coverage = coverage_of(200, layout, split=split)
        other = next(n for n in others if n not in groups)
        with pytest.raises(ForeignSegment, match=f"are not sent in plane group {other}"):
            coverage.add(extent_of(PAGE, PAGE, 0, 1, plane_group=other))
        for plan in plans:
            coverage.add(plan.extent)
        assert coverage.complete


def test_some_kv_heads_of_a_rank_are_refused_unless_its_routes_are_split() -> None:
    layout = layout_of(1, *COMPRESSED)
    for group in (1, 2):
        with pytest.raises(ForeignSegment, match="1 of 4 KV heads, which are not sent separately"):
            coverage_of(200, layout).add(
                extent_of(PAGE, PAGE, 0, 1, plane_group=group, num_kv_heads=1)
            )
    codes = 3
    assert layout.groups[codes].in_block
    coverage_of(200, layout, split=True).add(
        extent_of(PAGE, PAGE, 0, 1, plane_group=codes, num_kv_heads=1)
    )


def test_planned_segments_skip_layers_without_planes_of_the_group() -> None:
    layout = CacheLayout(PAGE, HEADS, ((WIDE,), (NARROW,), (WIDE, NARROW), (WIDE,)))
    plans = _plan(PAGE, layout, capacity=1 << 20)
    found = [(p.extent.plane_group, p.extent.first_layer, p.extent.num_layers) for p in plans]
    assert found == [(0, 0, 1), (0, 2, 2), (1, 1, 2)]
    coverage = coverage_of(PAGE, layout)
    for plan in plans:
        assert not coverage.complete
        coverage.add(plan.extent)
    assert coverage.complete
    with pytest.raises(ForeignSegment, match="no planes of group 1"):
        coverage_of(PAGE, layout).add(extent_of(0, PAGE, 0, 2, plane_group=1))


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
        extent_of(0, 16, 0, 4, num_kv_heads=0),
        extent_of(0, 16, 0, 4, first_kv_head=1),  # one KV head too many
        extent_of(16, 16, 0, 4),  # has arrived already
        extent_of(16, 16, 2, 1, first_kv_head=3, num_kv_heads=1),
        extent_of(0, 16, 0, 1, num_kv_heads=1),  # not all KV heads of the rank
    ],
)
def test_segment_outside_the_sequence_is_refused(extent: Extent) -> None:
    coverage = coverage_of(40, layout_of(4))
    coverage.add(extent_of(16, 16, 2, 1))
    with pytest.raises(ForeignSegment):
        coverage.add(extent)


def test_refused_segment_claims_nothing() -> None:
    coverage = coverage_of(32, layout_of(2))
    coverage.add(extent_of(16, 16, 1, 1))
    with pytest.raises(ForeignSegment):
        coverage.add(extent_of(0, 32, 0, 2))
    coverage.add(extent_of(0, 16, 0, 2))
    coverage.add(extent_of(16, 16, 0, 1))
    assert coverage.complete


def test_sequence_is_complete_with_all_kv_heads() -> None:
    coverage = coverage_of(PAGE, layout_of(1), split=True)
    coverage.add(extent_of(0, PAGE, 0, 1, first_kv_head=0, num_kv_heads=2, rank=0))
    assert not coverage.complete
    overlapping = extent_of(0, PAGE, 0, 1, first_kv_head=1, num_kv_heads=2, rank=1)
    with pytest.raises(ForeignSegment, match="announced twice"):
        coverage.add(overlapping)
    coverage.add(extent_of(0, PAGE, 0, 1, first_kv_head=2, num_kv_heads=2, rank=1))
    assert coverage.complete


@pytest.mark.parametrize(
    ("known", "prompt", "eviction", "computed", "kept"),
    [
        (150, 150, 0.0, 150, 150),
        (170, 150, 0.0, 170, 170),
        (150, 150, 0.5, 150, 86),
        (170, 150, 0.5, 150, 86),
    ],
)
def test_first_tokens_are_sampled_where_all_known_tokens_are_computed(
    known: int, prompt: int, eviction: float, computed: int, kept: int
) -> None:
    sent = SentTokens.of(
        layout_of(1).plan, known=known, prompt_tokens=prompt, kv_eviction=eviction, first=0
    )
    assert (sent.computed, sent.kept) == (computed, kept)
    assert sent.samples_first is (computed == known)
