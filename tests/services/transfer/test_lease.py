"""Leases: limits, expiry, and a stateful (model-based) test."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.transfer.errors import LeasesExhausted
from services.transfer.lease import LeaseTable

keys = st.sampled_from("abcdef")


def test_lease_past_its_end_cannot_be_renewed() -> None:
    table = LeaseTable(10.0, 2)
    table.grant("a", 0.0)
    assert table.renew("a", 9.5)
    assert table.expired(19.4) == []
    assert not table.renew("a", 19.5)
    assert table.active == 1
    assert table.expired(19.5) == ["a"]
    assert table.expired(19.5) == []
    assert not table.release("a")


def test_number_of_leases_is_bounded() -> None:
    table = LeaseTable(10.0, 2)
    table.grant("a", 0.0)
    table.grant("b", 1.0)
    table.grant("a", 2.0)
    with pytest.raises(LeasesExhausted):
        table.grant("c", 2.0)
    assert table.release("b")
    table.grant("c", 2.0)
    assert table.expired(100.0) == ["a", "c"]


@pytest.mark.parametrize(("lease_s", "max_leases"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_invalid_limits_are_refused(lease_s: float, max_leases: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        LeaseTable(lease_s, max_leases)


class LeaseMachine(RuleBasedStateMachine):
    """Stateful test: random calls of a `LeaseTable` at increasing times."""

    LEASE_S = 5
    MAX = 4

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(self.LEASE_S, self.MAX)
        self.ends: dict[str, int] = {}
        self.now = 0

    @rule(seconds=st.integers(0, 7))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(key=keys)
    def grant(self, key: str) -> None:
        if key not in self.ends and len(self.ends) == self.MAX:
            with pytest.raises(LeasesExhausted):
                self.table.grant(key, self.now)
            return
        self.table.grant(key, self.now)
        self.ends[key] = self.now + self.LEASE_S

    @rule(key=keys)
    def renew(self, key: str) -> None:
        alive = self.now < self.ends.get(key, -1)
        assert self.table.renew(key, self.now) == alive
        if alive:
            self.ends[key] = self.now + self.LEASE_S

    @rule(key=keys)
    def release(self, key: str) -> None:
        assert self.table.release(key) == (self.ends.pop(key, None) is not None)

    @rule()
    def expire(self) -> None:
        over = sorted(end for end in self.ends.values() if end <= self.now)
        assert [self.ends.pop(key) for key in self.table.expired(self.now)] == over

    @invariant()
    def counts(self) -> None:
        assert self.table.active == len(self.ends)


TestLeases = LeaseMachine.TestCase
