"""The page pool: page counts, allocation order and errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import OutOfPages
from runtime.pages.pool import PagePool


def test_pages_are_reused_in_the_order_of_their_release() -> None:
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([2, 0])
    assert pool.allocate(3) == [3, 2, 0]


def test_failed_allocation_takes_no_pages() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    with pytest.raises(OutOfPages):
        pool.allocate(2)
    assert pool.free == 1


def test_shared_page_is_freed_by_its_last_holder() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    assert pool.free == 1
    pool.release(pages)
    assert pool.free == 2
    with pytest.raises(ValueError, match="freed twice"):
        pool.release(pages)
    with pytest.raises(ValueError, match="free and cannot be shared"):
        pool.share(pages)


def test_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)


@given(st.lists(st.tuples(st.sampled_from("asr"), st.integers(0, 9)), max_size=80))
def test_free_pages_are_those_without_holders(actions: list[tuple[str, int]]) -> None:
    pool = PagePool(12)
    held = []
    for action, number in actions:
        if action == "a" and number <= pool.free:
            held += pool.allocate(number)
        elif action == "s" and held:
            pool.share([held[number % len(held)]])
            held.append(held[number % len(held)])
        elif action == "r" and held:
            pool.release([held.pop(number % len(held))])
        assert pool.free == pool.total - len(set(held))
    pool.release(held)
    assert sorted(pool.allocate(12)) == list(range(12))
