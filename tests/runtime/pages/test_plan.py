"""Numbers of pages of sequences, with and without a compressed KV format."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.pages.plan import PageCount, PagePlan, pages_for

plans = st.builds(
    PagePlan,
    page_size=st.sampled_from([1, 8, 16]),
    compressed=st.booleans(),
    sink_pages=st.integers(0, 2),
    window=st.integers(1, 70),
)
tokens = st.integers(1, 400)


@pytest.mark.parametrize(
    ("count", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (63, 4), (1000, 63)]
)
def test_pages_for_rounds_up(count: int, pages: int) -> None:
    assert pages_for(count, 16) == pages


@given(plans, tokens)
def test_each_page_is_sent_once_and_received_as_such(plan: PagePlan, length: int) -> None:
    exact, stored = (
        [page for pages in plan.sent(length, stored=kind) for page in pages]
        for kind in (False, True)
    )
    assert sorted(exact + stored) == list(range(plan.pages(length)))
    assert plan.received(length) == (len(exact), len(stored))


@given(plans, tokens, st.integers(0, 300), st.integers(1, 4))
def test_decode_needs_most_when_it_ends(
    plan: PagePlan, prompt: int, output: int, choices: int
) -> None:
    """A request that fits at its maximum length is never preempted for its own pages."""
    most = plan.decode(prompt, prompt + output, choices=choices)
    assert plan.decode(prompt, prompt + max(output - 1, 0), choices=choices).fits(most)
    assert plan.decode(prompt, prompt + output, choices=choices).fits(
        plan.decode(prompt, prompt + output, choices=choices + 1)
    )
    if choices == 1:
        assert plan.received(prompt).fits(most)


@given(plans, tokens, st.integers(0, 40), st.integers(0, 60))
def test_longest_sequence_that_fits(plan: PagePlan, prompt: int, exact: int, stored: int) -> None:
    total = PageCount(exact, stored if plan.compressed else 0)
    longest = plan.max_tokens(total)
    if longest >= prompt:
        assert plan.decode(prompt, longest).fits(total)
    assert not plan.decode(prompt, max(prompt, longest + 1)).fits(total)


@given(plans, tokens, st.integers(1, 300), st.integers(1, 4), st.booleans())
def test_admission_is_part_of_what_decode_needs(
    plan: PagePlan, prompt: int, output: int, choices: int, received: bool
) -> None:
    """A router that counts the whole output never overestimates what a worker admits."""
    limit = prompt + output
    needed = plan.admission(prompt, limit=limit, known=prompt, choices=choices, received=received)
    most = plan.decode(prompt, limit - 1, choices=choices, computed=not received)
    assert needed.fits(most)
