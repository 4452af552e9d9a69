"""Fields of step plans that other ranks get, and the encoding of sampling parameters as words.

Each field of the classes in `SENT` is either sent or declared as not read by executors.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from runtime.core.plan import Chunk, StepPlan
from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import SequenceGroup, SequenceState

CONSTANT = ("choice", "evicts")
"""Integers of a `SequenceState` that do not change, besides ``arrival``, by which it is known."""
CHANGING = ("evicted", "lookahead")
"""Integers of a `SequenceState` that change."""

SENT: Mapping[type, frozenset[str]] = {
    StepPlan: frozenset({"chunks", "decode", "prefilling"}),
    Chunk: frozenset({"group", "first", "count", "vacated", "scored"}),
    SequenceGroup: frozenset({"purpose", "sequences"}),
    SequenceState: frozenset(
        {"request", "arrival", *CONSTANT, *CHANGING, "tokens", "forced", "page_tables"}
    ),
    Request: frozenset({"prompt_tokens", "sampling"}),
    SamplingParams: frozenset(field.name for field in fields(SamplingParams)),
}
"""Fields that executors read. Copies on other ranks have the same values."""

NOT_READ: Mapping[type, frozenset[str]] = {
    StepPlan: frozenset({"reserved", "deferred", "refused"}),
    Chunk: frozenset(),
    SequenceGroup: frozenset(
        {
            *("computed", "position", "reused", "may_reuse", "may_compute", "receives", "worth"),
            *("scored", "leader", "shared"),
        }
    ),
    SequenceState: frozenset({"limit", "running", "cancelled", "resolved", "hashes", "matcher"}),
    Request: frozenset(
        {"id", "tokens", "max_tokens", "stop_token_ids", "choices", "salt", "grammar"}
    ),
    SamplingParams: frozenset(),
}
"""Fields that executors do not read. They are not sent; copies have any value."""


class WordReader:
    """Reads the words of a message in order."""

    def __init__(self, words: list[int]) -> None:
        self._words = words
        self._next = 0

    def word(self) -> int:
        """Return the next word."""
        self._next += 1
        return self._words[self._next - 1]

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` words."""
        self._next += count
        return self._words[self._next - count : self._next]

    def rest(self) -> list[int]:
        """Return all further words."""
        return self.take(len(self._words) - self._next)

    def items(self) -> list[int]:
        """Return the words of a list, see `add_items`."""
        return self.take(self.word())


def add_items(words: list[int], items: Iterable[int]) -> None:
    """Append the number of ``items`` and the items."""
    start = len(words)
    words.append(0)
    words += items
    words[start] = len(words) - start - 1


@dataclass(frozen=True)
class _Format:
    """Encoding of the values of one type as words."""

    add: Callable[[list[int], Any], None]
    read: Callable[[WordReader], Any]


def _signed(value: int) -> int:
    """Return the int64 with the low 64 bits of a number. More bits are not used by the sampling."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _bits(value: float) -> int:
    """Return the bits of an fp64 number."""
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return int(bits)


def _real(bits: int) -> float:
    """Return the fp64 number with these bits."""
    (value,) = struct.unpack("d", struct.pack("q", bits))
    return float(value)


def _add_biases(words: list[int], biases: Mapping[int, float]) -> None:
    add_items(words, biases)
    words += map(_bits, biases.values())


def _read_biases(reader: WordReader) -> dict[int, float]:
    tokens = reader.items()
    return dict(zip(tokens, map(_real, reader.take(len(tokens))), strict=True))


def _add_sequences(words: list[int], sequences: Iterable[Iterable[int]]) -> None:
    start = len(words)
    words.append(0)
    for count, sequence in enumerate(sequences, 1):
        add_items(words, sequence)
        words[start] = count


def _read_sequences(reader: WordReader) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(reader.items()) for _ in range(reader.word()))


_FORMATS: Mapping[Any, _Format] = {
    int: _Format(
        lambda words, value: words.append(_signed(value)),
        WordReader.word,
    ),
    bool: _Format(
        lambda words, value: words.append(int(value)),
        lambda reader: bool(reader.word()),
    ),
    float: _Format(
        lambda words, value: words.append(_bits(value)),
        lambda reader: _real(reader.word()),
    ),
    int | None: _Format(
        lambda words, value: add_items(words, () if value is None else (value,)),
        lambda reader: next(iter(reader.items()), None),
    ),
    frozenset[int]: _Format(add_items, lambda reader: frozenset(reader.items())),
    tuple[tuple[int, ...], ...]: _Format(_add_sequences, _read_sequences),
    Mapping[int, float]: _Format(_add_biases, _read_biases),
}
_SAMPLING = [(name, _FORMATS[kind]) for name, kind in get_type_hints(SamplingParams).items()]


def add_sampling(words: list[int], sampling: SamplingParams) -> None:
    """Append the words of all fields."""
    for name, kind in _SAMPLING:
        kind.add(words, getattr(sampling, name))


def read_sampling(reader: WordReader) -> SamplingParams:
    """Read the words that `add_sampling` appended."""
    return SamplingParams(**{name: kind.read(reader) for name, kind in _SAMPLING})
