"""Both workers derive from a request which of its tokens and pages are sent."""

import pytest

from runtime.pages.plan import PagePlan
from runtime.pages.sent import SentTokens
from tests.runtime.pages.plans import compressed_plan, sliding_plan

DENSE = PagePlan(16)


def sent(plan: PagePlan, *, known: int, prompt: int, share: float = 0.0) -> SentTokens:
    return SentTokens.of(plan, known=known, prompt_tokens=prompt, kv_eviction=share)


@pytest.mark.parametrize("plan", [DENSE, sliding_plan()])
def test_all_known_tokens_are_computed_and_sent(plan: PagePlan) -> None:
    found = sent(plan, known=230, prompt=200)
    assert (found.computed, found.kept, found.samples_first) == (230, 230, True)


def test_output_tokens_are_computed_again_if_decode_attends_to_other_kv() -> None:
    found = sent(compressed_plan(), known=230, prompt=200)
    assert (found.computed, found.kept, found.samples_first) == (200, 200, False)
    assert sent(compressed_plan(), known=200, prompt=200).samples_first


def test_evicted_tokens_are_not_sent() -> None:
    found = sent(DENSE, known=230, prompt=200, share=0.25)
    assert (found.computed, found.evicted, found.kept) == (200, 48, 152)
    assert found.pages(0) == (range(10),)
    assert not found.samples_first


def test_pages_are_those_of_the_plan() -> None:
    whole = SentTokens.whole(compressed_plan(), 200)
    assert (whole.known, whole.computed, whole.evicted) == (200, 200, 0)
    assert whole.pages(0) == (range(1), range(8, 13))
    assert whole.pages(1) == (range(1, 8),)


@pytest.mark.parametrize("first", [0, 16, 128, 144, 192])
@pytest.mark.parametrize("plan", [DENSE, sliding_plan(), compressed_plan()])
def test_pages_before_the_first_token_are_not_sent(plan: PagePlan, first: int) -> None:
    whole = SentTokens.whole(plan, 200)
    rest = SentTokens.of(plan, known=200, prompt_tokens=200, kv_eviction=0.0, first=first)
    for group in range(len(plan.groups)):
        pages = [page for pages in whole.pages(group) for page in pages]
        kept = [page for pages in rest.pages(group) for page in pages]
        assert kept == [page for page in pages if page >= first // 16]
    assert (rest.computed, rest.kept, rest.samples_first) == (200, 200, True)


@pytest.mark.parametrize("first", [-16, 8, 199, 208, 1 << 31])
def test_first_token_off_a_page_or_out_of_bounds_is_refused(first: int) -> None:
    with pytest.raises(ValueError, match=f"KV cannot be sent from token {first} of 200"):
        SentTokens(DENSE, 200, 200, first=first)


def test_evicted_prompt_is_sent_from_its_beginning() -> None:
    """The tokens that are kept are in other pages than they were computed in."""
    with pytest.raises(ValueError, match="of which 48 were evicted"):
        SentTokens.of(DENSE, known=230, prompt_tokens=200, kv_eviction=0.25, first=16)
