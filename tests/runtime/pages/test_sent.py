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
