"""Encoding of texts that begin like a recent one: only the rest is encoded.

The common beginning of the two texts is cut at its last break (`services.tokenizer.text_breaks`).
The tokens before it are copied, and the text after it is encoded.
"""

import unicodedata
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import tokenizers

from runtime.pages.recent import Recent
from services.tokenizer.text_breaks import has_breaks, last_break, steps_of

MIN_CHARS = 4096
"""Minimum length of a text whose encoding is kept or reused, characters."""


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


class PrefixEncoder:
    """Encodes texts. The ids are always those of ``backend``. Thread-safe.

    Args:
        pieces: bytes of each token.
        recent: texts that were encoded before. Several encoders may use it.
        name: name of this encoder among those that use ``recent``.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        pieces: Sequence[bytes],
        recent: Recent[EncodedText],
        name: str,
    ) -> None:
        self._backend = backend
        self._recent = recent
        self._name = name
        self._lengths = tuple(map(len, pieces))
        # Ids that the post-processor adds before and after a text; None: nothing is reused.
        self._added = _added_ids(backend) if has_breaks(backend) else None
        steps = steps_of(backend.normalizer) if self.reuses else []
        self._composes = any(step["type"] == "NFC" for step in steps)
        self._replaced = [s["pattern"]["String"] for s in steps if s["type"] == "Replace"]

    @property
    def reuses(self) -> bool:
        """Whether encodings are reused: whether the tokenizer permits it."""
        return self._added is not None

    def encode(self, text: str, *, add_special: bool, salt: bytes | None = None) -> "array[int]":
        """Return the token ids of a text, ``uint32[n]``.

        Args:
            add_special: add the special tokens that the model expects, such as BOS.
            salt: only encodings of texts with the same salt are reused; None: none is.
        """
        if salt is None or self._added is None or (data := self._separable(text)) is None:
            return array("I", self._encode(text, add_special))
        first, last = self._added if add_special else (array("I"), array("I"))
        return first + self._encode_rest(text, data, salt) + last

    def _separable(self, text: str) -> bytes | None:
        """Return a text in UTF-8, or None if it is short or the normalizer may change it."""
        if len(text) < MIN_CHARS or any(string in text for string in self._replaced):
            return None
        # Python has a later Unicode version than `tokenizers`. NFC of an earlier version does not
        # change a text that is in NFC of a later one.
        if self._composes and not unicodedata.is_normalized("NFC", text):
            return None
        try:
            return text.encode()
        except UnicodeEncodeError:  # a surrogate, which `tokenizers` refuses
            return None

    def _encode_rest(self, text: str, data: bytes, salt: bytes) -> "array[int]":
        """Encode what follows the common beginning with a recent text, and keep the result."""
        owner = (self._name, salt)
        earlier, common = self._recent.longest(owner, data)
        ids, ends = array("I"), array("I")
        at = last_break(data, common)
        if earlier is not None and at:
            count = bisect_left(earlier.ends, at) + 1  # a token ends at each break
            ids, ends = earlier.ids[:count], earlier.ends[:count]
        rest = self._encode(data[at:].decode() if at else text, add_special=False)
        ids.extend(rest)
        lengths = map(self._lengths.__getitem__, rest)
        ends.extend(islice(accumulate(lengths, initial=at), 1, None))
        if ends and ends[-1] == len(data):  # else the vocabulary lacks bytes of the text
            self._recent.add(owner, EncodedText(data, ids, ends), earlier)
        return ids

    def _encode(self, text: str, add_special: bool) -> list[int]:
        # Only the batch call releases the interpreter lock. Without it, encoding a long text in a
        # thread would block the event loop.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoding.ids)


def _added_ids(backend: tokenizers.Tokenizer) -> "tuple[array[int], array[int]] | None":
    """Return the ids that the post-processor adds before and after a text.

    Returns:
        None if the post-processor may do anything else.
    """
    steps = {step["type"] for step in steps_of(backend.post_processor)}
    if not steps <= {"ByteLevel", "TemplateProcessing"}:
        return None
    (plain,) = backend.encode_batch(["a"], add_special_tokens=False)
    (full,) = backend.encode_batch(["a"])
    mask = full.special_tokens_mask
    if mask.count(0) != 1 or plain.ids != [full.ids[mask.index(0)]]:
        return None
    at = mask.index(0)
    return array("I", full.ids[:at]), array("I", full.ids[at + 1 :])
