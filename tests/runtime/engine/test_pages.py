"""Allocation of pages to sequences."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from runtime.core.limits import Limits
from runtime.core.sequence import Purpose, SequenceState
from runtime.engine.pages import SequencePages
from runtime.engine.scheduler import Scheduler
from runtime.pages.plan import PageCount, PagePlan
from tests.runtime.pages.plans import compressed_plan, sliding_plan
from tests.runtime.tiny import request_of


@pytest.mark.parametrize(
    ("total", "running", "suffice"),
    [
        ((100,), 100, True),
        ((100,), 101, False),
        ((100, 100), 100, True),
        ((100, 50), 51, False),
        ((50, 100), 51, False),
    ],
)
def test_a_step_needs_at_most_one_page_of_each_group(
    total: tuple[int, ...], running: int, suffice: bool
) -> None:
    plan = PagePlan(16) if len(total) == 1 else compressed_plan()
    pages = SequencePages(plan, PageCount(*total))
    assert pages.suffice_for_step(running) is suffice


def test_steps_with_ample_pages_do_not_search_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(
        Limits(16, 64), plan=PagePlan(16), total=PageCount(100), context_length=400
    )
    for number in range(8):
        scheduler.submit(request_of(str(number), 40), Purpose.GENERATE)
    scheduler.step_launched(scheduler.plan())
    searches: list[list[SequenceState]] = []

    def lacking(plan: PagePlan, batch: list[SequenceState]) -> list[SequenceState]:
        searches.append(batch)
        return []

    monkeypatch.setattr(PagePlan, "lacking", lacking)
    assert scheduler.num_running == 8
    assert not scheduler.must_preempt
    assert not searches
    scheduler.pages.pools[0].allocate(scheduler.pages.free[0] - 7)
    assert not scheduler.must_preempt
    assert len(searches) == 1


@pytest.mark.parametrize("purpose", [Purpose.GENERATE, Purpose.RECEIVE])
def test_choices_of_a_short_prompt_take_no_encoded_pages(purpose: Purpose) -> None:
    plan = compressed_plan(16, 1, window=64)
    scheduler = Scheduler(Limits(16, 64), plan=plan, total=PageCount(40, 4), context_length=400)
    scheduler.pages.pools[1].allocate(4)  # those of other sequences
    request = request_of("r", 3, choices=3)
    scheduler.submit(request, purpose)
    planned = scheduler.plan()
    [group] = planned.reserved or [chunk.group for chunk in planned.chunks]
    assert [sequence.page_tables[1] for sequence in group.sequences] == 3 * [
        group.sequences[0].page_tables[1]
    ]
    assert len({sequence.page_tables[0][0] for sequence in group.sequences}) == 3


def test_a_prefix_cut_to_its_limit_has_the_pages_of_its_window() -> None:
    """A prefix of 32 tokens needs the two pages of its window that were evicted."""
    plan = sliding_plan(16, 24)
    scheduler = Scheduler(
        Limits(4, 4), plan=plan, total=plan.each(20), context_length=400, prefix_root=b"root"
    )
    scheduler.submit(request_of("first", 100), Purpose.GENERATE)
    step = scheduler.plan()
    evicted = step.chunks[0].group.sequences[0].page_tables[1][:2]
    scheduler.step_completed(scheduler.step_launched(step))
    scheduler.drop("first")
    for page in evicted:
        scheduler.pages.pools[1].forget(page)
    reused = {}
    for may_reuse in (None, 32, 64):
        key = str(may_reuse)
        scheduler.submit(request_of(key, 100), Purpose.RECEIVE, may_reuse, may_compute=100)
        [chunk] = scheduler.plan().chunks
        reused[may_reuse] = chunk.group.reused
        scheduler.drop(key)
    assert reused == {None: 96, 32: 0, 64: 64}


def test_a_search_for_cached_pages_copies_the_prompt_once() -> None:
    """It runs on the event loop of a worker, whatever the number of choices."""
    copies: list[int] = []

    class Prompt(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            copies.append(len(self))
            return super().__iter__()

    total = PageCount(20)
    scheduler = Scheduler(
        Limits(64, 4), plan=PagePlan(16), total=total, context_length=400, prefix_root=b"root"
    )
    one = request_of("first", 100)
    scheduler.submit(one, Purpose.GENERATE)
    scheduler.step_completed(scheduler.step_launched(scheduler.plan()))
    for choices, uncached in ((8, 4), (64, None)):
        request = replace(one, tokens=Prompt(one.tokens), choices=choices)
        assert scheduler.cached_tokens(request) == 96
        assert scheduler.uncached_tokens(request) == uncached
    assert copies == [100] * 4
