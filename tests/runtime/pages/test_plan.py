"""Numbers of pages of sequences in the groups of KV formats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from runtime.pages.groups import PageGroup, Part
from runtime.pages.plan import PageCount, PagePlan, pages_for
from tests.runtime.pages.plans import compressed_plan, sliding_plan

page_sizes, windows = st.sampled_from([1, 8, 16]), st.integers(1, 70)
compressed = st.builds(compressed_plan, page_sizes, st.integers(0, 2), windows)
sliding = st.builds(sliding_plan, page_sizes, windows)
plans = st.one_of(st.builds(PagePlan, page_sizes), compressed, sliding)
tokens = st.integers(1, 400)
GROUPS = PagePlan(16), compressed_plan(), sliding_plan()


@pytest.mark.parametrize(
    ("count", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (63, 4), (1000, 63)]
)
def test_pages_for_rounds_up(count: int, pages: int) -> None:
    assert pages_for(count, 16) == pages


def test_groups_hold_their_parts_of_a_sequence() -> None:
    full, compressed = (compressed_plan().sent(200, group) for group in range(2))
    assert full == (range(1), range(8, 13))  # tokens 136 to 199 are recent, page 8 starts at 128
    assert compressed == (range(1, 8),)
    whole, window = ([*sliding_plan().sent(200, group)] for group in range(2))
    assert [page for pages in whole for page in pages] == list(range(13))
    assert [page for pages in window for page in pages] == list(range(8, 13))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 64])
def test_window_holds_the_pages_of_the_tokens_that_are_attended(window: int) -> None:
    group = PageGroup("window", Part.ENDS, 0, window)
    for length in range(1, 200):
        attended = {token // 16 for token in range(max(0, length - window), length)}
        assert {page for pages in group.held(length, 16) for page in pages} == attended


@given(plans, tokens)
def test_pages_are_sent_in_each_group_and_received_as_such(plan: PagePlan, length: int) -> None:
    sent = [
        [page for pages in plan.sent(length, group) for page in pages]
        for group in range(len(plan.groups))
    ]
    assert plan.received(length) == tuple(map(len, sent))
    for group, pages in zip(plan.groups, sent, strict=True):
        assert pages == sorted(set(pages))
        if group.part is Part.ALL:
            assert pages == list(range(plan.pages(length)))
    if plan.encodes:
        assert sorted(sent[0] + sent[1]) == list(range(plan.pages(length)))


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
def test_longest_sequence_that_fits(plan: PagePlan, prompt: int, first: int, second: int) -> None:
    total = PageCount(first, second) if len(plan.groups) == 2 else PageCount(first)
    longest = plan.max_tokens(total)
    if longest >= prompt:
        assert plan.decode(prompt, longest).fits(total)
    assert not plan.decode(prompt, max(prompt, longest + 1)).fits(total)


def test_window_does_not_limit_the_length_of_a_sequence() -> None:
    plan = sliding_plan(window=64)
    assert plan.max_tokens(PageCount(100, 5)) == 1600
    assert plan.max_tokens(PageCount(100, 4)) == 64
    assert plan.decode(100, 1600) == (100, 5), "pages that left the window are not counted"
    assert plan.decode(100, 1600, computed=True) == (100, 7)


@given(plans, tokens, st.integers(1, 300), st.integers(1, 4), st.booleans())
def test_admission_is_part_of_what_decode_needs(
    plan: PagePlan, prompt: int, output: int, choices: int, received: bool
) -> None:
    """A router that counts the whole output never overestimates what a worker admits."""
    limit = prompt + output
    needed = plan.admission(prompt, limit=limit, known=prompt, choices=choices, received=received)
    most = plan.decode(prompt, limit - 1, choices=choices, computed=not received)
    assert needed.fits(most)


@pytest.mark.parametrize("plan", GROUPS)
def test_plan_travels_as_json(plan: PagePlan) -> None:
    """Workers register their plan."""
    adapter = TypeAdapter(PagePlan)
    arrived = adapter.validate_json(adapter.dump_json(plan))
    assert arrived == plan
    assert hash(arrived) == hash(plan)
    assert arrived.decode(200, 300) == plan.decode(200, 300)


@pytest.mark.parametrize(
    "document",
    [
        '{"page_size": 0}',
        '{"page_size": 16, "groups": []}',
        '{"page_size": 16, "groups": [{"name": "a"}, {"name": "a"}]}',
        '{"page_size": 16, "groups": [{"name": ""}]}',
        '{"page_size": 16, "groups": [{"name": "a", "part": "some"}]}',
        '{"page_size": 16, "groups": [{"name": "a", "part": "ends"}]}',
        '{"page_size": 16, "groups": [{"name": "a", "window": 16}]}',
        '{"page_size": 16, "groups": [{"name": "a", "part": "ends", "window": 9999999999}]}',
    ],
)
def test_malformed_plans_are_refused(document: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(PagePlan).validate_json(document)


def test_counts_by_name() -> None:
    plan = compressed_plan()
    count = plan.count({"compressed": 4, "full_precision": 3})
    assert count == PageCount(3, 4)
    assert plan.by_name(count) == {"full_precision": 3, "compressed": 4}
    with pytest.raises(ValueError, match="instead of full_precision, compressed"):
        plan.count({"kv": 3})


def test_counts_add_up_by_group() -> None:
    assert PageCount.total([PageCount(1, 2), PageCount(3, 4)]) == (4, 6)
    assert PageCount.total([]).fits(PageCount(0))
    assert PageCount(1, 2).minus(PageCount(3)) == (-2, 2)
    assert PageCount(1, 2).plus(PageCount(3, 1)) == (4, 3)
    assert PageCount(1, 2).times(3) == (3, 6)
    assert PageCount(1, 2).fits(PageCount(1, 2))
    assert not PageCount(1, 2).fits(PageCount(5, 1))
    assert not PageCount(1, 2).fits(PageCount(5))


def test_output_is_prefilled_only_if_it_attends_to_what_a_prompt_attends_to() -> None:
    assert PagePlan(16).prefilled(50, prompt_tokens=40) == 50
    assert PagePlan(16).prefilled(200, prompt_tokens=150, evicted=64) == 150
    assert compressed_plan().prefilled(50, prompt_tokens=40) == 40
