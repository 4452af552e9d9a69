"""Prompts whose first pages have KV when they are admitted: chunks, and what is reported."""

import pytest

from runtime.core.limits import Limits
from runtime.core.sequence import SequenceGroup
from runtime.engine import Add, Engine
from tests.runtime.engine.fake_executor import PAGE_SIZE, FakeExecutor
from tests.runtime.tiny import request_of

LIMITS = Limits(max_running=4, max_waiting=4, step_tokens=32, chunk_tokens=32)


def engine_that_reuses(tokens: int, patch: pytest.MonkeyPatch) -> Engine:
    """Return an engine whose prompts have the KV of their first tokens on admission."""
    engine = Engine(FakeExecutor(16, LIMITS))
    pages = engine.scheduler.pages
    admit = pages.admit

    def admit_and_reuse(group: SequenceGroup) -> None:
        admit(group)
        group.reused = tokens
        pages.set_computed(group, tokens)

    patch.setattr(pages, "admit", admit_and_reuse)
    return engine


@pytest.mark.parametrize("reused", [0, PAGE_SIZE, 3 * PAGE_SIZE])
def test_first_chunk_starts_after_reused_tokens(
    reused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_that_reuses(reused, monkeypatch)
    first = engine.step([Add(request_of("a", 100), hold=True)])
    second = engine.step([])
    assert (first.started, second.started) == (["a"], [])
    assert engine.scheduler.pending_prompt_tokens == max(0, 100 - reused - 64)


@pytest.mark.parametrize("reused", [0, PAGE_SIZE, 3 * PAGE_SIZE])
def test_reused_pages_are_reported_with_the_first_chunk(
    reused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_that_reuses(reused, monkeypatch)
    output = engine.step([Add(request_of("a", 100), hold=True)])
    [group] = engine.scheduler._prefilling
    pages = group.sequences[0].page_tables[0]
    chunks = list(output.computed)
    while not chunks[-1].completes:
        chunks += engine.step([]).computed
    assert (chunks[0].first_token, chunks[0].num_tokens) == (0, reused + 32)
    assert [chunk.first_token for chunk in chunks[1:]] == [*range(reused + 32, 100, 32)]
    assert sum(chunk.num_tokens for chunk in chunks) == 100
    assert [page for chunk in chunks for page in chunk.page_tables[0]] == pages
