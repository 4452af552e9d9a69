"""Credits never exceed the slots, and the oldest sequence of each peer makes progress."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.transfer.credit import CreditPool
from services.transfer.errors import CreditError
from services.transfer.shares import may_take


def test_oldest_sequence_gets_credits_first() -> None:
    pool = CreditPool(slots=8, per_sequence=3)
    for key in "abc":
        pool.join(key, "peer")
    assert pool.grants() == [("a", 3), ("b", 3)]
    assert pool.grants() == []
    pool.land("b")
    pool.freed("b")
    assert pool.grants() == [("b", 1)]
    pool.land("a")
    pool.leave("a")
    assert pool.grants() == [("c", 2)]
    pool.freed("a")
    assert pool.grants() == [("c", 1)]
    assert pool.free == 2


def test_stopped_peer_leaves_slots_for_others() -> None:
    """Its slots are occupied by READs that do not end."""
    pool = CreditPool(slots=16, per_sequence=4)
    for number in range(8):
        pool.join(f"stopped-{number}", "stopped")
    assert sum(credits for _, credits in pool.grants()) == 12
    pool.join("other", "live")
    assert pool.grants() == [("other", 3)]
    pool.join("third", "another")
    assert pool.grants() == [("third", 1)]


def test_misuse_raises_credit_error() -> None:
    pool = CreditPool(slots=2, per_sequence=1)
    pool.join("a", "peer")
    with pytest.raises(CreditError):
        pool.join("a", "peer")
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
    with pytest.raises(CreditError):
        pool.join("a", "peer")
    pool.freed("a")
    with pytest.raises(CreditError):
        pool.freed("a")
    assert pool.free == 2


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
        self.peers: dict[str, str] = {}
        self.count = 0

    def held(self, key: str) -> int:
        return self.granted.get(key, 0) + self.occupied.get(key, 0)

    def held_by(self, peer: str) -> int:
        return sum(self.held(key) for key, own in self.peers.items() if own == peer)

    def is_hungry(self, key: str) -> bool:
        """Whether a sequence may hold more slots, except that none may be free."""
        return key in self.members and self.held(key) < self.PER_SEQUENCE

    @rule(peer=st.sampled_from("xyz"))
    def join(self, peer: str) -> None:
        key = f"s{self.count}"
        self.count += 1
        self.pool.join(key, peer)
        self.members.append(key)
        self.peers[key] = peer

    @rule()
    def grant(self) -> None:
        grants = self.pool.grants()
        keys = [key for key, _ in grants]
        assert keys == [key for key in self.members if key in keys]
        for key, credits in grants:
            assert credits > 0
            self.granted[key] = self.granted.get(key, 0) + credits
            assert self.held(key) <= self.PER_SEQUENCE
        for peer in set(self.peers.values()):
            hungry = [k for k in self.members if self.peers[k] == peer and self.is_hungry(k)]
            if hungry:
                held = self.held_by(peer)
                assert not may_take(held, self.pool.free)
                younger = self.members[self.members.index(hungry[0]) + 1 :]
                assert not any(key in keys and self.peers[key] == peer for key in younger)

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
        if self.members and not self.held_by(self.peers[self.members[0]]):
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
