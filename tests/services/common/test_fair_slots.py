"""Slots: fair in cost, with one left for other tenants, and safe against cancellation."""

import asyncio

import pytest

from services.common.errors import Overloaded
from services.common.fair_slots import FairSlots


class Work:
    """Work that holds slots until it is told to finish, and records its order."""

    def __init__(self, slots: FairSlots) -> None:
        self._slots = slots
        self.order: list[str] = []
        self.running: dict[str, asyncio.Event] = {}

    def start(self, tenant: str, name: str, cost: int = 1, weight: int = 1) -> asyncio.Task[None]:
        return asyncio.create_task(self._run(tenant, name, cost, weight))

    async def _run(self, tenant: str, name: str, cost: int, weight: int) -> None:
        async with self._slots.hold(tenant, weight=weight, cost=cost):
            self.order.append(name)
            finish = self.running[name] = asyncio.Event()
            await finish.wait()

    async def finish_all(self) -> list[str]:
        """Finish the work one by one, and return the order in which it ran."""
        while self.running:
            self.running.pop(next(iter(self.running))).set()
            await settle()
        return self.order


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def slots_of(count: int, per_tenant: int | None = None, max_waiting: int = 100) -> FairSlots:
    return FairSlots(count, per_tenant=per_tenant or count, max_waiting=max_waiting)


async def test_tenant_that_always_has_work_leaves_a_slot() -> None:
    work = Work(slots_of(3, 2))
    tasks = [work.start("flood", f"f{i}", 1000) for i in range(5)]
    await settle()
    assert work.order == ["f0", "f1"]
    tasks.append(work.start("other", "o"))
    await settle()
    assert work.order == ["f0", "f1", "o"]
    assert await work.finish_all() == ["f0", "f1", "o", "f2", "f3", "f4"]
    await asyncio.gather(*tasks)


async def test_slots_are_shared_by_cost_and_not_by_number() -> None:
    work = Work(slots_of(1))
    tasks = [work.start("large", f"l{i}", 300) for i in range(3)]
    tasks += [work.start("small", f"s{i}", 100) for i in range(6)]
    await settle()
    order = await work.finish_all()
    assert order[:1] == ["l0"]
    assert [name[0] for name in order[1:5]].count("s") == 3
    await asyncio.gather(*tasks)


async def test_cancelled_work_leaves_the_queue_and_its_slot() -> None:
    work = Work(slots_of(1))
    running, first, second = (work.start("a", name) for name in ("running", "first", "second"))
    await settle()
    first.cancel()
    running.cancel()
    await settle()
    assert work.order == ["running", "second"]
    second.cancel()
    await settle()
    third = work.start("a", "third")
    await settle()
    assert work.order[-1] == "third"
    third.cancel()
    await asyncio.gather(running, first, second, third, return_exceptions=True)


async def test_work_that_is_cancelled_when_it_gets_its_slot_returns_it() -> None:
    slots = slots_of(1)
    work = Work(slots)
    async with slots.hold("a"):
        waiting, last = work.start("a", "waiting"), work.start("a", "last")
        await settle()
    waiting.cancel()  # the slot was granted, but the task has not run since
    await settle()
    assert work.order == ["last"]
    last.cancel()
    await asyncio.gather(waiting, last, return_exceptions=True)


async def test_surplus_of_the_heaviest_tenant_is_refused() -> None:
    work = Work(slots_of(1, max_waiting=3))
    tasks = [work.start("flood", f"f{i}", 50) for i in range(4)]
    await settle()
    other = work.start("other", "o", 10)
    await settle()
    with pytest.raises(Overloaded):
        await tasks[3]
    assert await work.finish_all() == ["f0", "o", "f1", "f2"]
    await asyncio.gather(*tasks[:3], other)


async def test_slot_is_wanted_from_the_tenant_with_the_most_if_another_could_use_it() -> None:
    slots = slots_of(3, 2)
    work = Work(slots)
    tasks = [work.start(tenant, tenant + str(i)) for i, tenant in enumerate("aab")]
    await settle()
    assert not slots.is_free("c")
    assert not any(map(slots.is_wanted, "ab")), "nobody waits"
    tasks.append(work.start("a", "waiting"))
    await settle()
    assert [slots.is_wanted(tenant) for tenant in "ab"] == [True, False]
    await work.finish_all()
    await asyncio.gather(*tasks)
    assert all(map(slots.is_free, "abc"))


async def test_charged_tenant_waits_longer() -> None:
    slots = FairSlots(1, per_tenant=1, max_waiting=8)
    order: list[str] = []

    async def work(tenant: str) -> None:
        async with slots.hold(tenant, cost=10):
            order.append(tenant)

    async with slots.hold("a", cost=10):
        waiting = [asyncio.create_task(work(tenant)) for tenant in ("a", "b", "b")]
        await asyncio.sleep(0)
        slots.charge("a", 15)
    await asyncio.gather(*waiting)
    assert order == ["b", "b", "a"]
