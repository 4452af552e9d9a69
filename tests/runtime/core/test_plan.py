"""Choice of prompt chunks: budget, page boundaries and order. What a step samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.limits import Limits
from runtime.core.plan import MAX_CHUNKS, Chunk, StepPlan, choose_chunks
from runtime.core.sequence import Purpose, SequenceGroup, SequenceState
from runtime.pages.plan import PagePlan
from tests.runtime.tiny import request_of

PAGE = 16


def group_of(tokens: int, computed: int = 0, position: int = 0) -> SequenceGroup:
    request = request_of("r", tokens)
    sequence = SequenceState(request, 0, 0, list(request.tokens), tokens + 8)
    return SequenceGroup(Purpose.GENERATE, [sequence], computed, position)


def chosen(
    groups: list[SequenceGroup], decoded: int, *, step_tokens: int, chunk_tokens: int
) -> list[tuple[int, int]]:
    """Return the index of each chunk's group and the chunk's number of tokens."""
    limits = Limits(8, 8, step_tokens=step_tokens, chunk_tokens=chunk_tokens)
    chunks = choose_chunks(groups, decoded, limits, PagePlan(PAGE))
    return [(groups.index(chunk.group), chunk.count) for chunk in chunks]


def test_last_chunk_is_cut_at_a_page_to_fill_the_budget() -> None:
    groups = [group_of(100), group_of(300), group_of(150)]
    assert chosen(groups, 40, step_tokens=256, chunk_tokens=128) == [(0, 100), (2, 112)]
    assert chosen(groups, 0, step_tokens=256, chunk_tokens=128) == [(0, 100), (2, 128), (1, 16)]
    assert chosen(groups, 0, step_tokens=512, chunk_tokens=128) == [(0, 100), (2, 128), (1, 128)]


def test_prompt_that_fits_into_the_rest_of_a_page_is_not_delayed() -> None:
    assert chosen([group_of(34), group_of(1)], 15, step_tokens=32, chunk_tokens=32) == [
        (1, 1),
        (0, PAGE),
    ]
    groups = [group_of(50), group_of(9)]
    assert chosen(groups, 5, step_tokens=64, chunk_tokens=64) == [(1, 9), (0, 50)]


def test_short_prompt_overtakes_a_long_one() -> None:
    groups = [group_of(1000), group_of(30, position=1000), group_of(500, position=1030)]
    assert chosen(groups, 0, step_tokens=256, chunk_tokens=256) == [(1, 30), (2, 224)]


def test_prompt_does_not_overtake_one_that_is_nearly_computed() -> None:
    groups = [group_of(1000, computed=800), group_of(30, position=1000)]
    assert chosen(groups, 0, step_tokens=256, chunk_tokens=256) == [(0, 200), (1, 30)]


def test_last_chunk_of_a_prompt_names_the_pages_that_eviction_leaves_empty() -> None:
    group = group_of(160, computed=96)
    group.sequences[0].evicts = 32
    limits = Limits(8, 8, step_tokens=64, chunk_tokens=32)
    [first] = choose_chunks([group], 0, limits, PagePlan(PAGE))
    assert (first.completes, len(first.vacated)) == (False, 0)
    group.computed = first.end
    [last] = choose_chunks([group], 0, limits, PagePlan(PAGE))
    assert (last.completes, last.vacated) == (True, range(4, 6)), "the window has 4 pages"


def test_step_samples_after_complete_prompts_without_forced_tokens() -> None:
    decoded, first = group_of(8), group_of(40)
    second = SequenceState(first.request, 1, 1, list(first.tokens), 48)
    group = SequenceGroup(Purpose.GENERATE, [*first.sequences, second])
    chunks = [Chunk(group, 0, 32), Chunk(group, 32, 8)]
    assert [(chunk.starts, chunk.completes, chunk.samples) for chunk in chunks] == [
        (True, False, False),
        (False, True, True),
    ]

    group.reused = 32
    assert [chunk.starts for chunk in chunks] == [False, True]

    def sampled(chunk: Chunk) -> list[SequenceState]:
        return StepPlan([chunk], decoded.sequences, [], [], [], frozenset()).sampled

    assert sampled(chunks[0]) == decoded.sequences
    assert sampled(chunks[1]) == [*decoded.sequences, *group.sequences]
    for sequence in (*decoded.sequences, *group.sequences):
        sequence.forced.append(1)
    assert sampled(chunks[1]) == []
    assert not chunks[1].samples


def test_single_prompt_gets_the_whole_step() -> None:
    assert chosen([group_of(100_000)], 0, step_tokens=256, chunk_tokens=256) == [(0, 256)]


def test_equal_prompts_are_computed_one_after_the_other() -> None:
    groups = [group_of(1000), group_of(1000)]
    assert chosen(groups, 0, step_tokens=256, chunk_tokens=256) == [(0, 256)]


@pytest.mark.parametrize("newer", [1, 60, 500, 1999])
def test_few_tokens_of_newer_prompts_are_computed_before_a_prompt(newer: int) -> None:
    limits = Limits(8, 8, step_tokens=256, chunk_tokens=256)
    long = group_of(2000)
    groups = [long]
    end = 2000
    overtaking = 0
    while long in groups:
        while len(groups) < 2 * MAX_CHUNKS:
            groups.append(group_of(newer, position=end))
            end += newer
        for chunk in choose_chunks(groups, 0, limits, PagePlan(PAGE)):
            chunk.group.computed += chunk.count
            if chunk.group is not long:
                overtaking += chunk.count
            if not chunk.group.left:
                groups.remove(chunk.group)
    assert overtaking < 3 * 2000 + limits.step_tokens


def test_prompts_are_computed_even_if_the_decode_batch_fills_the_step() -> None:
    for decoded in (60, 64, 200):
        assert chosen([group_of(100)], decoded, step_tokens=64, chunk_tokens=64) == [(0, PAGE)]


def test_number_of_chunks_is_limited() -> None:
    groups = [group_of(3) for _ in range(MAX_CHUNKS + 4)]
    assert len(chosen(groups, 0, step_tokens=512, chunk_tokens=512)) == MAX_CHUNKS


@given(
    lengths=st.lists(st.integers(1, 300), max_size=8),
    decoded=st.integers(0, 300),
    pages=st.integers(1, 8),
    rest=st.integers(0, 100),
)
def test_chunks_fill_the_budget(lengths: list[int], decoded: int, pages: int, rest: int) -> None:
    limits = Limits(8, 8, step_tokens=pages * PAGE + rest, chunk_tokens=pages * PAGE)
    groups = [
        group_of(length, length // 2 // PAGE * PAGE, sum(lengths[:index]))
        for index, length in enumerate(lengths)
    ]
    chunks = choose_chunks(groups, decoded, limits, PagePlan(PAGE))
    budget = max(limits.step_tokens - decoded, PAGE)
    left = budget - sum(chunk.count for chunk in chunks)
    assert left >= 0
    for chunk in chunks:
        assert chunk.first == chunk.group.computed
        assert 0 < chunk.count <= limits.chunk_tokens
        assert chunk.completes or (chunk.first + chunk.count) % PAGE == 0
    assert left < PAGE or all(is_full(chunk, limits) for chunk in chunks)
    assert left < PAGE or len(chunks) == len(groups)
    assert chunks or not groups


def is_full(chunk: Chunk, limits: Limits) -> bool:
    return chunk.completes or chunk.count == limits.chunk_tokens
