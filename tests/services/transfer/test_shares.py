"""Slots shared among readers: a stopped reader never holds all of them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.transfer.errors import SlotError
from services.transfer.shares import SharedSlots
from services.transfer.slab import SlotRef


def take_all(slots: SharedSlots, reader: str) -> list[SlotRef]:
    """Acquire slots until the reader gets no more; return their number."""
    return list(iter(lambda: slots.acquire(reader), None))


@pytest.mark.parametrize(
    ("slots", "shares"),
    [
        (1, [1, 0]),
        (2, [1, 1, 0]),
        (3, [2, 1, 0]),
        (4, [3, 1, 0]),
        (16, [12, 3, 1, 0]),
        (64, [48, 12, 3, 1, 0]),
    ],
)
def test_stopped_readers_leave_slots_for_others(slots: int, shares: list[int]) -> None:
    shared = SharedSlots(range(slots))
    assert [len(take_all(shared, f"reader {n}")) for n in range(len(shares))] == shares
    assert shared.in_use == slots


def test_released_slot_can_be_acquired_again() -> None:
    shared = SharedSlots(range(4))
    first = take_all(shared, "a")
    for ref in first:
        shared.release(ref, "a")
    assert shared.in_use == 0
    assert len(take_all(shared, "b")) == 3
    with pytest.raises(SlotError):
        shared.release(first[0], "a")


@given(
    slots=st.integers(1, 20),
    calls=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=120),
)
def test_reader_without_a_slot_always_gets_a_free_one(
    slots: int, calls: list[tuple[str, bool]]
) -> None:
    shared = SharedSlots(range(slots))
    refs: dict[str, list[SlotRef]] = {reader: [] for reader in "abcd"}
    for reader, wants in calls:
        held = len(refs[reader])
        free = slots - shared.in_use
        if wants:
            ref = shared.acquire(reader)
            assert (ref is not None) == (free > 0 and (not held or held + 1 <= 3 * (free - 1)))
            refs[reader] += [ref] if ref else []
        elif held:
            shared.release(refs[reader].pop(0), reader)
        counts = Counter({reader: len(own) for reader, own in refs.items()})
        assert shared.in_use == counts.total()
        assert max(counts.values()) <= max(1, 3 * slots // 4)
