"""A landing slot and its credit return only when nothing can touch the slot."""

import asyncio
import concurrent.futures

import pytest

from services.transfer.errors import CreditError, ReadTimeout
from services.transfer.landing_slots import LandingSlots


class _Granted:
    def __init__(self) -> None:
        self.credits: dict[str, int] = {}

    def __call__(self, key: str, credits: int) -> None:
        self.credits[key] = self.credits.get(key, 0) + credits


@pytest.fixture
def granted() -> _Granted:
    return _Granted()


@pytest.fixture
def landing(granted: _Granted) -> LandingSlots:
    return LandingSlots(range(3), 2, granted)


def test_oldest_sequence_gets_credits_first(landing: LandingSlots, granted: _Granted) -> None:
    landing.join("old", "peer")
    landing.join("young", "peer")
    assert granted.credits == {"old": 2}
    landing.free_after(landing.land("old"), "old", None)
    assert granted.credits == {"old": 3}
    landing.leave("old")
    assert granted.credits == {"old": 3, "young": 2}


def test_segment_without_credit_is_refused(landing: LandingSlots) -> None:
    with pytest.raises(CreditError):
        landing.land("nobody")


async def test_slot_is_quarantined_while_a_future_may_touch_it(
    landing: LandingSlots, granted: _Granted
) -> None:
    landing.join("a", "peer")
    slot = landing.land("a")
    user: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    landing.free_after(slot, "a", user)
    landing.leave("a")
    assert landing.quarantined == 1
    user.set_result(None)
    await asyncio.sleep(0)
    assert landing.quarantined == 0


async def test_timed_out_read_quarantines_its_slot_until_drained(
    landing: LandingSlots,
) -> None:
    landing.join("a", "peer")
    slot = landing.land("a")
    drained: concurrent.futures.Future[None] = concurrent.futures.Future()
    user: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    landing.free_after(slot, "a", user)
    user.set_exception(ReadTimeout("too long", drained))
    await asyncio.sleep(0.01)
    assert (landing.quarantined, landing.overdue) == (1, 1)
    drained.set_result(None)
    await asyncio.sleep(0.01)
    assert (landing.quarantined, landing.overdue) == (0, 0)
    landing.leave("a")
    landing.join("b", "peer")
    assert landing.land("b") != slot
