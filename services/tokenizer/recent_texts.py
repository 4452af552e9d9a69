"""Recently encoded texts, to find the one that shares the longest beginning with a new text."""

import threading
from array import array
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class EncodedText:
    """A text with its tokens, without those that a post-processor adds.

    Attributes:
        data: the text in UTF-8.
        ids: token ids, ``uint32[n]``.
        ends: position in ``data`` after each token, bytes, ``uint32[n]``.
    """

    data: bytes
    ids: "array[int]"
    ends: "array[int]"

    @property
    def size(self) -> int:
        """Size in memory, bytes."""
        return len(self.data) + sum(len(each) * each.itemsize for each in (self.ids, self.ends))


class RecentTexts:
    """The most recently used texts, by owner. Thread-safe.

    Args:
        max_texts: maximum number of texts.
        max_bytes: maximum total of `EncodedText.size`.
    """

    def __init__(self, max_texts: int = 64, max_bytes: int = 16 << 20) -> None:
        self._max_texts = max_texts
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Least recently used first.
        self._texts: dict[tuple[Hashable, bytes], EncodedText] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._texts)

    def longest(self, owner: Hashable, data: bytes) -> tuple[EncodedText | None, int]:
        """Return the text of ``owner`` with the longest common beginning, and its length in bytes.

        The text is None if no text of the owner begins with the same byte.
        """
        with self._lock:
            candidates = [text for (other, _), text in self._texts.items() if other == owner]
        found, common = None, 0
        for text in reversed(candidates):
            if common == len(data):
                break
            if text.data[: common + 1] == data[: common + 1]:
                found, common = text, _common_length(data, text.data, common)
        return found, common

    def add(self, owner: Hashable, text: EncodedText, earlier: EncodedText | None) -> None:
        """Add a text and remove the least recently used ones that exceed the limits.

        A text that needs more than a quarter of the memory is not added.

        Args:
            earlier: result of `longest` for this text. It is removed if ``text`` begins with it,
                else it counts as used.
        """
        with self._lock:
            if earlier is not None and self._pop(owner, earlier.data):
                self._insert(owner, earlier)  # most recently used
            if text.size > self._max_bytes // 4:
                return
            if earlier is not None and text.data.startswith(earlier.data):
                self._pop(owner, earlier.data)
            self._pop(owner, text.data)
            self._insert(owner, text)
            while len(self._texts) > self._max_texts or self._bytes > self._max_bytes:
                self._pop(*next(iter(self._texts)))

    def _insert(self, owner: Hashable, text: EncodedText) -> None:
        self._texts[owner, text.data] = text
        self._bytes += text.size

    def _pop(self, owner: Hashable, data: bytes) -> bool:
        text = self._texts.pop((owner, data), None)
        self._bytes -= text.size if text else 0
        return text is not None


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
