"""Recently used byte strings, to find the one that shares the longest beginning with a new one."""

import threading
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Entry(Protocol):
    """A byte string with what is known of it."""

    @property
    def data(self) -> bytes:
        """The byte string."""
        ...

    @property
    def size(self) -> int:
        """Size in memory, bytes."""
        ...


E = TypeVar("E", bound=Entry)


class Recent(Generic[E]):
    """The most recently used entries, by owner. Thread-safe.

    Args:
        max_entries: maximum number of entries.
        max_bytes: maximum total of `Entry.size`.
    """

    def __init__(self, max_entries: int = 64, max_bytes: int = 16 << 20) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Least recently used first.
        self._entries: dict[tuple[Hashable, bytes], E] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, owner: Hashable, data: bytes) -> tuple[E | None, int]:
        """Return the entry of ``owner`` with the longest common beginning, and its length in bytes.

        The entry is None if no entry of the owner begins with the same byte.
        """
        with self._lock:
            candidates = [entry for (other, _), entry in self._entries.items() if other == owner]
        found, common = None, 0
        for entry in reversed(candidates):
            if common == len(data):
                break
            kept = entry.data
            # Most entries differ in this byte, so that few beginnings are compared.
            if kept[common : common + 1] == data[common : common + 1] and (
                kept[:common] == data[:common]
            ):
                found, common = entry, _common_length(data, kept, common)
        return found, common

    def add(self, owner: Hashable, entry: E, earlier: E | None) -> None:
        """Add an entry and remove the least recently used ones that exceed the limits.

        An entry that needs more than a quarter of the memory is not added.

        Args:
            earlier: result of `longest` for this entry. It is removed if the data of ``entry``
                begin with its data, else it counts as used.
        """
        with self._lock:
            if earlier is not None and self._pop(owner, earlier.data):
                self._insert(owner, earlier)  # most recently used
            if entry.size > self._max_bytes // 4:
                return
            if earlier is not None and entry.data.startswith(earlier.data):
                self._pop(owner, earlier.data)
            self._pop(owner, entry.data)
            self._insert(owner, entry)
            while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
                self._pop(*next(iter(self._entries)))

    def _insert(self, owner: Hashable, entry: E) -> None:
        self._entries[owner, entry.data] = entry
        self._bytes += entry.size

    def _pop(self, owner: Hashable, data: bytes) -> bool:
        entry = self._entries.pop((owner, data), None)
        self._bytes -= entry.size if entry else 0
        return entry is not None


def _common_length(one: bytes, other: bytes, least: int) -> int:
    """Return the length of the common beginning, which is at least ``least`` bytes."""
    most = min(len(one), len(other))
    while least < most:  # comparing slices takes one memcmp
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
