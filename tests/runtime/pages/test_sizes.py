"""Page pools fill the memory; groups that hold windows get what a batch needs, and at most half."""

import pytest

from runtime.pages.groups import PageGroup, Part
from runtime.pages.plan import PageCount, PagePlan
from runtime.pages.sizes import (
    PageBytes,
    least_bytes,
    pools_of_bytes,
    pools_of_tokens,
    sequence_bytes,
    token_bytes,
)
from tests.runtime.pages.plans import compressed_plan

GIB = 1 << 30
LLAMA_7B = 32 * 2 * 32 * 128 * 2  # bytes of K and V of a token, bf16: 512 KiB
MOST = 1 << 22  # pages


COMPRESSED = PageBytes(compressed_plan(), (16 * LLAMA_7B, 4 * LLAMA_7B))
LAYERED = PageBytes(
    PagePlan(
        16,
        (
            PageGroup("full"),
            PageGroup("near", Part.ENDS, 0, 64),
            PageGroup("far", Part.ENDS, 0, 256),
        ),
    ),
    (100, 500, 300),
)
SLIDING = PageBytes(PagePlan(16, (PageGroup("window", Part.ENDS, 0, 64),)), (100,))


def dense(page_bytes: int) -> PageBytes:
    return PageBytes(PagePlan(16), (page_bytes,))


def test_compressed_formats_get_windows_for_a_batch_and_a_prompt() -> None:
    """6 pages for each of 256 sequences, 512 for 8,192 tokens; the rest of 60 GiB is compressed."""
    windows = COMPRESSED.plan.batch(256, 8192)
    assert windows == PageCount(6 * 256 + 512, 0)
    found = pools_of_bytes(COMPRESSED, 60 * GIB, windows, MOST)
    assert found == (windows[0], (60 * GIB - windows[0] * 16 * LLAMA_7B) // (4 * LLAMA_7B))


def test_windows_take_at_most_half_of_the_memory() -> None:
    windows = PageCount(10_000, 0)
    assert pools_of_bytes(COMPRESSED, GIB, windows, MOST) == (64, 256)
    assert pools_of_bytes(LAYERED, 160_000, PageCount(0, 1000, 50), MOST) == (800, 130, 50)


def test_windows_of_several_groups_and_pages_of_all_tokens() -> None:
    windows = LAYERED.plan.batch(4, 128)
    assert windows == PageCount(0, 4 * 5 + 8, 4 * 17 + 8)
    assert pools_of_bytes(LAYERED, 100_000, windows, MOST) == ((100_000 - 36_800) // 100, 28, 76)


def test_number_of_pages_is_bounded() -> None:
    assert pools_of_bytes(dense(1), 1 << 40, PageCount(0), 99) == (99,)


@pytest.mark.parametrize("kind", [COMPRESSED, LAYERED, SLIDING, dense(7)])
def test_least_bytes_are_a_page_of_each_group(kind: PageBytes) -> None:
    windows = kind.plan.batch(1000, 100_000)
    least = least_bytes(kind)
    assert all(pools_of_bytes(kind, least, windows, MOST))
    assert kind.of(pools_of_bytes(kind, least, windows, MOST)) <= least
    assert not all(pools_of_bytes(kind, kind.of(kind.plan.step) - 1, windows, MOST))


def test_only_windows_take_all_of_the_memory() -> None:
    assert pools_of_bytes(SLIDING, 1000, PageCount(100), MOST) == (10,)


def test_token_slots_are_those_of_pages_outside_of_windows() -> None:
    windows = PageCount(960, 0)
    assert pools_of_tokens(COMPRESSED.plan, 16_384, windows) == (960, 1024)
    assert pools_of_tokens(COMPRESSED.plan, 160, windows) == (10, 10)
    assert pools_of_tokens(PagePlan(16), 175, PageCount(0)) == (10,)


def test_bytes_of_a_sequence_are_those_of_its_tokens() -> None:
    """1,024 of 1,108 tokens are compressed: those of the 64 pages between sink and window."""
    assert token_bytes(COMPRESSED) == LLAMA_7B / 4
    assert sequence_bytes(COMPRESSED, 1108) == 84 * LLAMA_7B + 1024 * LLAMA_7B / 4
    for tokens in (1, 16, 17, 70):
        assert sequence_bytes(COMPRESSED, tokens) == tokens * LLAMA_7B
    assert sequence_bytes(dense(160), 70) == 700
    assert sequence_bytes(LAYERED, 65) == 65 * 900 / 16
    assert sequence_bytes(LAYERED, 80) == (80 * 400 + 64 * 500) / 16
    assert token_bytes(LAYERED) == 100 / 16
    assert token_bytes(SLIDING) == 0


def test_sizes_must_be_those_of_the_groups() -> None:
    with pytest.raises(ValueError, match="2 sizes for 1 page groups"):
        PageBytes(PagePlan(16), (1, 2))
    with pytest.raises(ValueError, match="out of bounds"):
        PageBytes(PagePlan(16), (-1,))
