"""A ring of records in shared memory, through which one process sends messages to others.

A message is an int64 array. It takes as many consecutive records as it needs, and may be longer
than the ring: the writer sends a part of it as soon as all readers have freed records. Its first
record starts with its length.

Positions are not in shared memory. The writer adds the number of records that it has written to a
`SharedCounter` of each reader, and the reader adds the number of those that it has copied to a
counter of the writer. A record is therefore read after it was written and overwritten after it was
copied; see `SharedCounter` for the order of memory accesses. A process that waits for a counter
uses no CPU time.

The writer also holds the write end of a pipe, which the kernel closes when the process ends. A
reader then returns the messages that are complete, and after them None.
"""

import select
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import ArrayLike

from runtime.engine.shared import SharedCounter, SharedWords, Words
from runtime.errors import RankTimeout


@dataclass(frozen=True)
class RingSize:
    """Size of a ring.

    Attributes:
        records: number of records.
        words: number of words of 8 bytes in a record.
    """

    records: int = 1024
    words: int = 512


class RingReader:
    """The end of one reader. It can be passed to a process that is spawned.

    Args:
        written: number of records that the writer has written and this reader has not taken.
        copied: number of records that this reader has copied and the writer has not taken.
        alive: the end of a pipe whose other end only the writer holds.
    """

    def __init__(
        self,
        memory: SharedWords,
        size: RingSize,
        written: SharedCounter,
        copied: SharedCounter,
        alive: Connection,
    ) -> None:
        self._memory = memory
        self._size = size
        self._written = written
        self._copied = copied
        self._alive = alive
        self._next = 0
        self._available = 0
        self._taken = 0

    def read(self) -> Words | None:
        """Wait for the next message. Return None if the writer has ended."""
        record = self._record()
        if record is None:
            return None
        message = np.empty(record[0], np.int64)
        part = record[1 : 1 + len(message)]
        message[: len(part)] = part
        end = len(part)
        while end < len(message):
            record = self._record()
            if record is None:
                return None
            part = record[: len(message) - end]
            message[end : end + len(part)] = part
            end += len(part)
        self._free()
        return message

    def _record(self) -> Words | None:
        """Return the next record, valid until the next call; None if the writer has ended."""
        if not self._available:
            self._free()
            if not self._wait():
                return None
            self._available = self._written.take()
        start = self._next * self._size.words
        self._next = (self._next + 1) % self._size.records
        self._available -= 1
        self._taken += 1
        return self._memory.words[start : start + self._size.words]

    def _wait(self) -> bool:
        """Wait for a record. Return False if there is none and the writer has ended."""
        ready = {number for number, _ in self._poll.poll()}
        return self._written.fileno() in ready

    @cached_property
    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._written, select.POLLIN)
        poll.register(self._alive, select.POLLIN)
        return poll

    def _free(self) -> None:
        """Let the writer overwrite the records that were copied."""
        if self._taken:
            self._copied.add(self._taken)
            self._taken = 0


@dataclass
class _Reader:
    """A reader as the writer sees it: it has freed ``free`` records."""

    written: SharedCounter
    copied: SharedCounter
    free: int


class RingWriter:
    """The end of the writer.

    Args:
        readers: number of readers.
        timeout_s: maximum time in seconds to wait until a reader frees a record.

    Attributes:
        readers: the end of each reader.
    """

    def __init__(self, readers: int, *, timeout_s: float, size: RingSize) -> None:
        self._timeout_s = timeout_s
        self._size = size
        self._memory = SharedWords.of(size.records * size.words)
        self._next = 0
        alive, self._alive = Pipe(duplex=False)
        self._readers = [
            _Reader(SharedCounter.of_zero(), SharedCounter.of_zero(), size.records)
            for _ in range(readers)
        ]
        self.readers = tuple(
            RingReader(self._memory, size, reader.written, reader.copied, alive)
            for reader in self._readers
        )

    def write(self, words: ArrayLike, timeout_s: float | None = None) -> None:
        """Send a message to all readers.

        Args:
            timeout_s: instead of that of the ring.

        Raises:
            RankTimeout: a reader, named by its rank from 1, freed no record in time. The ring is
                then closed, because the message is incomplete.
            OSError: the ring is closed.
        """
        if self.closed:
            raise OSError("the ring is closed")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        body = np.asarray(words, np.int64)
        message = np.empty(1 + len(body), np.int64)
        message[0] = len(body)
        message[1:] = body
        while len(message):
            count = min(self._free(timeout_s), self._size.records - self._next)
            part, message = np.split(message, [count * self._size.words])
            start = self._next * self._size.words
            self._memory.words[start : start + len(part)] = part
            self._publish(-(-len(part) // self._size.words))

    @property
    def closed(self) -> bool:
        """Whether the readers were ended."""
        return self._alive.closed

    def close(self) -> None:
        """End the readers, after the messages that were sent."""
        self._alive.close()

    def _free(self, timeout_s: float) -> int:
        """Return the number of records that all readers have freed, at least one."""
        for rank, reader in enumerate(self._readers, 1):
            if not reader.free:
                if not reader.copied.wait(timeout_s):
                    self.close()
                    raise RankTimeout(
                        f"rank {rank} took no message of the first rank in {timeout_s} s"
                    )
                reader.free = reader.copied.take()
        return min(reader.free for reader in self._readers)

    def _publish(self, records: int) -> None:
        self._next = (self._next + records) % self._size.records
        for reader in self._readers:
            reader.free -= records
            reader.written.add(records)
