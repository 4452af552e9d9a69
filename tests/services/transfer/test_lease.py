"""Leases: expiry, and a stateful (model-based) test."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.transfer.lease import LeaseTable

keys = st.sampled_from("abcdef")


def test_lease_runs_only_while_its_reader_has_something_to_acknowledge() -> None:
    table = LeaseTable(10.0)
    table.grant("a", "reader")
    assert table.expired(1000.0) == []
    table.run("a", 1000.0)
    table.run("a", 1005.0)
    assert table.expired(1009.9) == []
    table.pause("a")
    assert table.expired(2000.0) == []
    table.run("a", 2000.0)
    assert table.expired(2010.0) == ["a"]
    assert table.expired(2010.0) == []
    assert table.active == 0


def test_progress_of_a_reader_restarts_all_its_leases() -> None:
    """A segment waits for those of other sequences on the same link."""
    table = LeaseTable(10.0)
    for key, reader in (("a", "slow"), ("b", "slow"), ("c", "stopped")):
        table.grant(key, reader)
        table.run(key, 0.0)
    for now in (6.0, 12.0, 18.0):
        table.progressed("slow", now)
    assert table.expired(27.9) == ["c"]
    assert table.expired(28.0) == ["a", "b"]


def test_progress_of_a_reader_without_leases_is_not_kept() -> None:
    table = LeaseTable(10.0)
    table.progressed("reader", 1.0)
    assert not table._progress


def test_lease_is_granted_once() -> None:
    table = LeaseTable(10.0)
    table.grant("a", "reader")
    table.run("a", 0.0)
    table.grant("a", "reader")
    assert table.active == 1
    assert table.expired(10.0) == ["a"]


class LeaseMachine(RuleBasedStateMachine):
    """Stateful test: random calls of a `LeaseTable` at increasing times."""

    LEASE_S = 5

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(self.LEASE_S)
        self.readers: dict[str, str] = {}
        self.ends: dict[str, int] = {}  # of the leases that run
        self.now = 0

    @rule(seconds=st.integers(0, 7))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(key=keys, reader=st.sampled_from("xy"))
    def grant(self, key: str, reader: str) -> None:
        self.table.grant(key, reader)
        self.readers.setdefault(key, reader)

    @rule(key=keys)
    def run(self, key: str) -> None:
        self.table.run(key, self.now)
        if key in self.readers:
            self.ends.setdefault(key, self.now + self.LEASE_S)

    @rule(key=keys)
    def pause(self, key: str) -> None:
        self.table.pause(key)
        self.ends.pop(key, None)

    @rule(reader=st.sampled_from("xy"))
    def progress(self, reader: str) -> None:
        self.table.progressed(reader, self.now)
        for key in self.ends:
            if self.readers[key] == reader:
                self.ends[key] = self.now + self.LEASE_S

    @rule(key=keys)
    def release(self, key: str) -> None:
        self.ends.pop(key, None)
        self.readers.pop(key, None)
        self.table.release(key)

    @rule()
    def expire(self) -> None:
        over = sorted(end for end in self.ends.values() if end <= self.now)
        expired = self.table.expired(self.now)
        assert [self.ends.pop(key) for key in expired] == over
        for key in expired:
            del self.readers[key]

    @invariant()
    def counts(self) -> None:
        assert self.table.active == len(self.readers)


TestLeases = LeaseMachine.TestCase
