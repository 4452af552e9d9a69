"""Recent byte strings: longest common beginning, owners and limits."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.pages.recent import Recent


@dataclass(frozen=True)
class Text:
    data: bytes
    added: int = 0

    @property
    def size(self) -> int:
        return len(self.data) + self.added


def test_entry_with_the_longest_common_beginning_is_found() -> None:
    recent = Recent[Text]()
    for data in (b"abc1", b"abcd2", b"x"):
        recent.add("me", Text(data), None)
    found, common = recent.longest("me", b"abcdef")
    assert found is not None
    assert (found.data, common) == (b"abcd2", 4)
    assert recent.longest("me", b"y") == (None, 0)
    assert recent.longest("other", b"abcdef") == (None, 0)


@given(st.lists(st.binary(max_size=40), max_size=5), st.binary(max_size=40), st.data())
def test_length_is_that_of_a_comparison_by_byte(
    kept: list[bytes], shared: bytes, draw: st.DataObject
) -> None:
    recent = Recent[Text]()
    every = [shared + rest for rest in kept]
    for data in every:
        recent.add("me", Text(data), None)
    new = shared + draw.draw(st.binary(max_size=40))

    lengths = [max(n for n in range(len(new) + 1) if other.startswith(new[:n])) for other in every]
    assert recent.longest("me", new)[1] == max(lengths, default=0)


def test_continuation_replaces_the_shorter_one() -> None:
    recent = Recent[Text]()
    recent.add("me", Text(b"ab"), None)
    earlier, _ = recent.longest("me", b"abc")
    recent.add("me", Text(b"abc"), earlier)
    assert len(recent) == 1
    earlier, _ = recent.longest("me", b"abd")
    recent.add("me", Text(b"abd"), earlier)
    assert len(recent) == 2


def test_least_recently_used_entry_is_removed() -> None:
    recent = Recent[Text](max_entries=2)
    recent.add("me", Text(b"a1"), None)
    recent.add("me", Text(b"b1"), None)
    earlier, _ = recent.longest("me", b"a2")
    recent.add("me", Text(b"a2"), earlier)
    assert recent.longest("me", b"b1") == (None, 0)
    assert recent.longest("me", b"a1")[1] == 2


@pytest.mark.parametrize("size", [40, 250])
def test_memory_is_limited(size: int) -> None:
    recent = Recent[Text](max_entries=64, max_bytes=1000)
    for number in range(100):
        recent.add(number % 3, Text(b"%3d" % number + bytes(size - 19), added=16), None)
    assert len(recent) == 1000 // size


def test_entry_that_needs_a_large_part_of_the_memory_is_not_kept() -> None:
    recent = Recent[Text](max_bytes=1000)
    recent.add("me", Text(bytes(100)), None)
    recent.add("me", Text(bytes(11), added=240), None)
    assert len(recent) == 1


def test_entries_of_the_same_data_are_kept_once() -> None:
    recent = Recent[Text](max_bytes=400)
    for _ in range(9):
        earlier, _ = recent.longest("me", bytes(100))
        recent.add("me", Text(bytes(100)), earlier)
    recent.add("me", Text(b"x" * 100), None)
    assert len(recent) == 2
