"""Remembered prompts of a worker: bounded, last used kept, and compared with a simple model."""

from hypothesis import given
from hypothesis import strategies as st

from services.common.prefix_hashes import ENDS, LENGTHS, MAX_BLOCKS
from services.router.prefix_memory import PrefixMemory


def prompt(name: str, blocks: int) -> tuple[bytes, ...]:
    """Return the hashes of a prompt; each letter of the name is the text of a block."""
    return tuple((name[: at + 1] + f"-{at}").encode() for at in range(blocks))


prompts = st.builds(prompt, st.text("ab", min_size=1, max_size=4), st.integers(0, 12))


@given(
    st.lists(st.tuples(prompts, prompts, st.integers(0, 40)), max_size=40),
    st.integers(0, 30),
    st.sampled_from([0, 64, 500, 1 << 20]),
)
def test_memory_is_bounded_and_knows_no_block_without_those_before(
    events: list[tuple[tuple[bytes, ...], tuple[bytes, ...], int]],
    max_blocks: int,
    max_tokens: int,
) -> None:
    memory = PrefixMemory(max_blocks, max_tokens)
    placed: set[bytes] = set()
    for number, (placing, asked, withdrawn) in enumerate(events):
        if withdrawn < number:
            memory.forget(events[withdrawn][0], str(withdrawn))
            assert memory.tokens == sum(memory._blocks.values())
        memory.remember(placing, str(number))
        placed.update(placing)
        assert memory._placements.keys() <= memory._blocks.keys()
        assert len(memory) <= max_blocks
        assert memory.tokens <= max_tokens
        assert memory.tokens == sum(memory._blocks.values())
        blocks = memory._blocks.keys()
        known = [block in blocks for block in asked]
        assert known == sorted(known, reverse=True)
        assert memory.known_tokens(asked) == sum(
            length for length, each in zip(LENGTHS, known, strict=False) if each
        )
        assert blocks <= placed
        fits = len(placing) <= max_blocks and (not placing or ENDS[len(placing) - 1] <= max_tokens)
        if fits and placing:
            assert memory.known_tokens(placing) == ENDS[len(placing) - 1], "the last one is known"


def test_prompt_that_was_not_placed_for_longest_is_forgotten_first() -> None:
    memory = PrefixMemory(6, 1 << 20)
    first, second, third = (prompt(name, 3) for name in ("aaa", "bbb", "ccc"))
    for each in (first, second, first, third):
        memory.remember(each, "id")
    assert memory.known_tokens(second) == 0
    assert memory.known_tokens(first) == memory.known_tokens(third) == ENDS[2]


def test_last_blocks_of_a_prompt_are_forgotten_first() -> None:
    memory = PrefixMemory(4, 1 << 20)
    memory.remember(prompt("aaa", 3), "1")
    memory.remember(prompt("bb", 2), "2")
    assert memory.known_tokens(prompt("aaa", 3)) == ENDS[1]


def test_prompt_with_more_blocks_than_the_limit_is_known_up_to_it() -> None:
    memory = PrefixMemory(5, 1 << 20)
    memory.remember(prompt("a", MAX_BLOCKS), "id")
    assert memory.known_tokens(prompt("a", MAX_BLOCKS)) == ENDS[4]


def test_blocks_of_a_withdrawn_prompt_are_forgotten_but_for_those_of_others() -> None:
    memory = PrefixMemory(20, 1 << 20)
    memory.remember(prompt("a", 2), "first")
    memory.remember(prompt("abcd", 6), "withdrawn")
    memory.remember(prompt("abce", 4), "later")
    memory.forget(prompt("abcd", 6), "withdrawn")
    assert memory.known_tokens(prompt("abcd", 6)) == ENDS[2]
    assert memory.known_tokens(prompt("abce", 4)) == ENDS[3]
    memory.forget(prompt("abcd", 6), "withdrawn")
    assert len(memory) == 5
