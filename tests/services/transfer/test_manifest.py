"""Segments: planned so that they fit, and accepted only where they cover a sequence once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.transfer.errors import ForeignSegment
from services.transfer.manifest import Coverage, SegmentPlan, plan_segments

PAGE = 16


def _bound(layers: int, tokens: int) -> int:
    return 100 + 48 * layers + 500 * layers * tokens


def _plan(num_tokens: int, num_layers: int, capacity: int, first: int = 0) -> list[SegmentPlan]:
    pages = tuple(range(1000, 1000 - (-num_tokens // PAGE)))
    return list(
        plan_segments(
            first_token=first,
            num_tokens=num_tokens,
            pages=pages,
            page_size=PAGE,
            num_layers=num_layers,
            capacity=capacity,
            bound=_bound,
        )
    )


@given(
    num_tokens=st.integers(1, 400),
    num_layers=st.integers(1, 40),
    slack=st.integers(0, 400_000),
    first_page=st.integers(0, 5),
)
def test_plans_fit_and_cover_everything_once(
    num_tokens: int, num_layers: int, slack: int, first_page: int
) -> None:
    capacity = _bound(1, min(PAGE, num_tokens)) + slack
    first = first_page * PAGE
    coverage = Coverage(first + num_tokens, num_layers, PAGE)
    if first:
        coverage.add(0, first, 0, num_layers)
    for plan in _plan(num_tokens, num_layers, capacity, first):
        assert _bound(plan.num_layers, plan.num_tokens) <= capacity
        covered = coverage.add(plan.first_token, plan.num_tokens, plan.first_layer, plan.num_layers)
        assert plan.pages == tuple(1000 + at - first_page for at in covered)
    assert coverage.complete


def test_a_slot_that_holds_no_page_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold one page"):
        _plan(17, 2, capacity=_bound(1, PAGE) - 1)


@pytest.mark.parametrize(
    ("first_token", "num_tokens", "first_layer", "num_layers"),
    [
        (8, 16, 0, 1),  # not on a page boundary
        (0, 20, 0, 1),  # ends inside a page that is not the last
        (32, 16, 0, 1),  # past the end
        (0, 0, 0, 1),
        (0, 16, 3, 2),  # a layer too many
        (0, 16, 0, 0),
        (16, 16, 0, 4),  # there already
    ],
)
def test_segments_outside_the_sequence_are_refused(
    first_token: int, num_tokens: int, first_layer: int, num_layers: int
) -> None:
    coverage = Coverage(40, 4, PAGE)
    coverage.add(16, 16, 2, 1)
    with pytest.raises(ForeignSegment):
        coverage.add(first_token, num_tokens, first_layer, num_layers)


def test_a_refused_segment_claims_nothing() -> None:
    coverage = Coverage(32, 2, PAGE)
    coverage.add(16, 16, 1, 1)
    with pytest.raises(ForeignSegment):
        coverage.add(0, 32, 0, 2)
    coverage.add(0, 16, 0, 2)
    coverage.add(16, 16, 0, 1)
    assert coverage.complete
