"""Credits never exceed the slots, and the oldest sequence always makes progress."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.transfer.credit import CreditPool
from services.transfer.errors import CreditError


def test_oldest_sequence_gets_credits_first() -> None:
    pool = CreditPool(slots=5, per_sequence=3)
    pool.join("a")
    pool.join("b")
    pool.join("c")
    assert pool.grants() == [("a", 3), ("b", 2)]
    assert pool.grants() == []
    pool.land("b")
    pool.freed("b")
    assert pool.grants() == [("b", 1)]
    pool.land("a")
    pool.leave("a")
    assert pool.grants() == [("b", 1), ("c", 1)]
    pool.freed("a")
    assert pool.grants() == [("c", 1)]
    assert pool.free == 0


def test_misuse_raises_credit_error() -> None:
    pool = CreditPool(slots=2, per_sequence=1)
    pool.join("a")
    with pytest.raises(CreditError):
        pool.join("a")
    with pytest.raises(CreditError):
        pool.land("a")
    with pytest.raises(CreditError):
        pool.freed("a")
    with pytest.raises(CreditError):
        pool.land("nobody")
    assert pool.grants() == [("a", 1)]
    pool.land("a")
    pool.leave("a")
    pool.leave("a")
    pool.leave("nobody")
    pool.freed("a")
    with pytest.raises(CreditError):
        pool.freed("a")
    assert pool.free == 2


@pytest.mark.parametrize(("slots", "per_sequence"), [(0, 1), (1, 0)])
def test_pool_without_slots_is_refused(slots: int, per_sequence: int) -> None:
    with pytest.raises(ValueError, match="slots"):
        CreditPool(slots, per_sequence)


class CreditMachine(RuleBasedStateMachine):
    """Stateful test: random calls of a `CreditPool`, compared with simple counters."""

    SLOTS = 6
    PER_SEQUENCE = 3

    def __init__(self) -> None:
        super().__init__()
        self.pool = CreditPool(self.SLOTS, self.PER_SEQUENCE)
        self.members: list[str] = []  # oldest first
        self.granted: dict[str, int] = {}
        self.occupied: dict[str, int] = {}
        self.count = 0

    def held(self, key: str) -> int:
        return self.granted.get(key, 0) + self.occupied.get(key, 0)

    @rule()
    def join(self) -> None:
        key = f"s{self.count}"
        self.count += 1
        self.pool.join(key)
        self.members.append(key)

    @precondition(lambda self: any(self.occupied.values()))
    @rule(data=st.data())
    def rejoin(self, data: st.DataObject) -> None:
        draining = sorted(key for key, n in self.occupied.items() if n and key not in self.members)
        if draining:
            key = data.draw(st.sampled_from(draining))
            self.pool.join(key)
            self.members.append(key)

    @rule()
    def grant(self) -> None:
        grants = self.pool.grants()
        keys = [key for key, _ in grants]
        assert keys == [key for key in self.members if key in keys]
        for key, credits in grants:
            assert credits > 0
            self.granted[key] = self.granted.get(key, 0) + credits
            assert self.held(key) <= self.PER_SEQUENCE
        hungry = [key for key in self.members if self.held(key) < self.PER_SEQUENCE]
        if hungry:
            assert self.pool.free == 0
            younger = self.members[self.members.index(hungry[0]) + 1 :]
            assert not any(key in keys for key in younger)

    @precondition(lambda self: any(self.granted.values()))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(k for k, n in self.granted.items() if n)))
        self.pool.land(key)
        self.granted[key] -= 1
        self.occupied[key] = self.occupied.get(key, 0) + 1

    @precondition(lambda self: any(self.occupied.values()))
    @rule(data=st.data())
    def free_a_slot(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(k for k, n in self.occupied.items() if n)))
        self.pool.freed(key)
        self.occupied[key] -= 1
        if self.members and self.held(self.members[0]) < self.PER_SEQUENCE:
            self.grant()
            assert self.held(self.members[0]) > 0

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.members))
        self.pool.leave(key)
        self.members.remove(key)
        self.granted.pop(key, None)

    @invariant()
    def credits_never_exceed_slots(self) -> None:
        held = sum(self.granted.values()) + sum(self.occupied.values())
        assert held + self.pool.free == self.SLOTS
        assert self.pool.free >= 0

    def teardown(self) -> None:
        """All slots are free once every sequence has left and every slot was freed."""
        for key in list(self.members):
            self.pool.leave(key)
        for key, occupied in self.occupied.items():
            for _ in range(occupied):
                self.pool.freed(key)
        assert self.pool.free == self.SLOTS


TestCredits = CreditMachine.TestCase
