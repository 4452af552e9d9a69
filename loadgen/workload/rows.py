"""Rows of JSON that users wrote, read with care: what is wrong is told with file and place."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from loadgen.errors import UsageError


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a file. All methods raise `UsageError` where a value is of a wrong kind.

    Attributes:
        where: for messages: the file, and the line or the entry in it.
    """

    where: str
    values: dict[str, Any]

    def wrong(self, why: str) -> UsageError:
        """The error that says what is wrong with this row."""
        return UsageError(f"{self.where}: {why}")

    def whole(self, key: str, *, least: int) -> int:
        """A whole number."""
        value = self.values.get(key)
        if type(value) is not int or value < least:
            raise self.wrong(f"{key} is not a whole number of at least {least}")
        return value

    def whole_list(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, none below 0; not empty."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(f"{key} is not a list with numbers in it")
        if not all(type(item) is int and item >= 0 for item in value):
            raise self.wrong(f"{key} has something in it that is not a whole number from 0 on")
        return tuple(value)

    def seconds(self, key: str) -> float | None:
        """A time given in milliseconds, in seconds; None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.wrong(f"{key} is not a number of milliseconds")
        return float(value) / 1000


def read_lines(path: Path) -> Iterator[Row]:
    """The objects of a JSONL file; empty lines are passed over.

    Raises:
        UsageError: the file cannot be read, or a line is no JSON object.
    """
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.strip():
            yield _row(f"{path}:{number}", _parse(f"{path}:{number}", line))


def read_list(path: Path) -> Iterator[Row]:
    """The objects of a JSON file that is one list; entries are counted from 0.

    Raises:
        UsageError: the file cannot be read, is no list, or an entry is no object.
    """
    entries = _parse(str(path), _read(path))
    if not isinstance(entries, list):
        raise UsageError(f"{path}: not a list")
    for number, entry in enumerate(entries):
        yield _row(f"{path}, entry {number}", entry)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _parse(where: str, text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON: {error}") from error


def _row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: not a JSON object")
    return Row(where, value)
