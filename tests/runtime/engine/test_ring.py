"""Messages through a ring of records, between threads and between processes."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.ring import RingReader, RingSize, RingWriter
from runtime.errors import RankTimeout

SIZE = RingSize(records=5, words=8)
WAIT_S = 60.0


def received(reader: RingReader) -> Iterator[list[int]]:
    while (message := reader.read()) is not None:
        yield message.tolist()


class Receiver(threading.Thread):
    """Reads all messages of a ring in a thread."""

    def __init__(self, reader: RingReader) -> None:
        super().__init__(daemon=True)
        self.reader = reader
        self.messages: list[list[int]] = []
        self.start()

    def run(self) -> None:
        self.messages += received(self.reader)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 100), max_size=20), readers=st.integers(1, 3))
def test_every_reader_gets_all_messages_in_order(lengths: list[int], readers: int) -> None:
    """Most of the messages are longer than the ring, which has 40 words."""
    writer = RingWriter(readers, timeout_s=WAIT_S, size=SIZE)
    threads = [Receiver(reader) for reader in writer.readers]
    messages = [[1000 * number + word for word in range(n)] for number, n in enumerate(lengths)]
    for message in messages:
        writer.write(message)
    writer.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert thread.messages == messages


@pytest.mark.parametrize("words", [0, 1, 6, 7, 8, 15, 16, 38, 39])
def test_message_that_fits_is_sent_without_a_reader_at_work(words: int) -> None:
    writer = RingWriter(1, timeout_s=0, size=SIZE)
    [reader] = writer.readers
    for _ in range(3):
        writer.write(range(words))
        message = reader.read()
        assert message is not None
        assert message.dtype == np.int64
        assert message.tolist() == [*range(words)]


def test_reader_that_is_a_ring_behind_is_named_and_ends() -> None:
    writer = RingWriter(3, timeout_s=0.01, size=SIZE)
    first, stuck, _ = writer.readers
    for message in range(5):
        writer.write([message])
    assert first.read() is not None
    with pytest.raises(RankTimeout, match="rank 2 took no message"):
        writer.write([5])
    assert [message for [message] in received(stuck)] == [*range(5)]
    with pytest.raises(OSError, match="closed"):
        writer.write([6])


def test_incomplete_message_of_a_closed_ring_is_not_returned() -> None:
    writer = RingWriter(1, timeout_s=0.01, size=SIZE)
    with pytest.raises(RankTimeout):
        writer.write(range(100))
    assert list(received(writer.readers[0])) == []
