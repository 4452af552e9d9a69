"""Credits: landing slots that a reader grants to its sequences, first come first served."""

from collections import Counter
from dataclasses import dataclass

from services.transfer.errors import CreditError
from services.transfer.shares import may_take


@dataclass
class _Account:
    """Slots of a sequence.

    Attributes:
        granted: number of credits that were granted and not used yet.
        occupied: number of slots that hold a segment.
        member: whether the sequence still gets credits; False after it has left.
    """

    peer: str
    granted: int = 0
    occupied: int = 0
    member: bool = True

    @property
    def held(self) -> int:
        return self.granted + self.occupied


class CreditPool:
    """Shares landing slots among sequences, oldest first. Pure bookkeeping; not thread-safe.

    A free slot goes to the oldest sequence that holds fewer than ``per_sequence`` and whose peer is
    within its share (`may_take`). The oldest sequence of each peer therefore makes progress, even
    if another peer has stopped and its slots cannot be used again. Granted and occupied slots
    together never exceed ``slots``, so every credit has a free slot for its segment.

    Args:
        slots: number of slots of the landing slab.
        per_sequence: maximum number of slots of one sequence, granted plus occupied.

    Attributes:
        free: number of slots that are neither granted nor occupied.
    """

    def __init__(self, slots: int, per_sequence: int) -> None:
        self._per_sequence = per_sequence
        self.free = slots
        # Accounts by sequence, the oldest first.
        self._accounts: dict[str, _Account] = {}
        # Number of granted and occupied slots by peer.
        self._held: Counter[str] = Counter()

    def join(self, key: str, peer: str) -> None:
        """Add a sequence as the youngest one.

        Args:
            peer: the worker that sends its segments.

        Raises:
            CreditError: the sequence has joined already, or still occupies slots.
        """
        if key in self._accounts:
            raise CreditError(f"{key} has joined already")
        self._accounts[key] = _Account(peer)

    def grants(self) -> list[tuple[str, int]]:
        """Grant free slots; return (sequence, number of new credits) pairs, without zeros."""
        granted: list[tuple[str, int]] = []
        for key, account in self._accounts.items():
            credits = 0
            while account.member and account.held < self._per_sequence:
                if not may_take(self._held[account.peer], self.free):
                    break
                account.granted += 1
                self._held[account.peer] += 1
                self.free -= 1
                credits += 1
            if credits:
                granted.append((key, credits))
        return granted

    def land(self, key: str) -> None:
        """Turn one credit into an occupied slot, for an announced segment.

        Raises:
            CreditError: the sequence has no credit.
        """
        account = self._accounts.get(key)
        if account is None or not account.granted:
            raise CreditError(f"{key} has no credit")
        account.granted -= 1
        account.occupied += 1

    def freed(self, key: str) -> None:
        """Return an occupied slot to the pool, possibly after the sequence has left.

        Raises:
            CreditError: the sequence occupies no slot.
        """
        account = self._accounts.get(key)
        if account is None or not account.occupied:
            raise CreditError(f"{key} occupies no slot")
        account.occupied -= 1
        self._return(account.peer, 1)
        self._forget(key, account)

    def leave(self, key: str) -> None:
        """Remove a sequence. Unused credits return at once, occupied slots when freed.

        Idempotent.
        """
        account = self._accounts.get(key)
        if account is None:
            return
        self._return(account.peer, account.granted)
        account.granted = 0
        account.member = False
        self._forget(key, account)

    def _return(self, peer: str, slots: int) -> None:
        self.free += slots
        self._held[peer] -= slots
        if not self._held[peer]:
            del self._held[peer]

    def _forget(self, key: str, account: _Account) -> None:
        if not account.member and not account.held:
            del self._accounts[key]
