"""Validated rows of user-supplied JSON files. Errors name the file and the line or entry."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from loadgen.errors import UsageError


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object of a file. All accessors raise `UsageError` for a value of the wrong type.

    Attributes:
        where: location for error messages: the file and the line or entry.
    """

    where: str
    values: dict[str, Any]

    def error(self, why: str) -> UsageError:
        """Return an error that names this row."""
        return UsageError(f"{self.where}: {why}")

    def integer(self, key: str, *, minimum: int) -> int:
        """Return an integer."""
        value = self.values.get(key)
        if type(value) is not int or value < minimum:
            raise self.error(f"{key} is not an integer of at least {minimum}")
        return value

    def integer_list(self, key: str) -> tuple[int, ...]:
        """Return the value of a key, which must be a non-empty list of non-negative integers."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value:
            raise self.error(f"{key} is not a non-empty list")
        if not all(type(item) is int and item >= 0 for item in value):
            raise self.error(f"{key} has an item that is not a non-negative integer")
        return tuple(value)

    def seconds(self, key: str) -> float | None:
        """Return a value in seconds, converted from milliseconds; None if it is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(f"{key} is not a number of milliseconds")
        return float(value) / 1000


def read_lines(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSONL file, skipping empty lines.

    Raises:
        UsageError: if the file cannot be read or a line is not a JSON object.
    """
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.strip():
            yield _row(f"{path}:{number}", _parse(f"{path}:{number}", line))


def read_list(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON list; entries are numbered from 0.

    Raises:
        UsageError: if the file cannot be read, is not a list, or an entry is not an object.
    """
    entries = _parse(str(path), _read(path))
    if not isinstance(entries, list):
        raise UsageError(f"{path}: not a list")
    for number, entry in enumerate(entries):
        yield _row(f"{path}, entry {number}", entry)


def read_settings(path: Path) -> Row:
    """Return the object in a YAML or JSON file.

    Raises:
        UsageError: if the file cannot be read or is not an object.
    """
    try:
        return _row(str(path), yaml.safe_load(_read(path)))
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not YAML: {error}") from error


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
