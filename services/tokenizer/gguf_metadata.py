"""Read the metadata of a GGUF file in about 0.1 s. Parsing the whole file takes seconds.

Layout (GGUF specification, versions 2 and 3, little-endian)::

    file:   magic u32, version u32, number of tensors u64, number of entries u64, entries
    entry:  key string, type u32, value
    string: length u64, UTF-8 bytes
    array:  item type u32, count u64, items

``python gguf_metadata.py FILE`` drops the tensors of a file, for an image that only tokenizes.
"""

import mmap
import struct
import sys
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"

_SCALARS = "BbHhIif?"
"""Format characters of `struct` for the GGUF value types 0 to 7."""
_STRING, _ARRAY = 8, 9
_WIDE = {10: "Q", 11: "q", 12: "d"}
_LETTERS = dict(enumerate(_SCALARS)) | _WIDE
_TENSOR_COUNT_AT = 8


class MetadataError(ValueError):
    """The file is not GGUF, or is damaged."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Return all metadata entries by key. Values are numbers, strings, or lists of these.

    Raises:
        MetadataError: if the file is not GGUF 2 or 3, is truncated, or has invalid UTF-8.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Cursor(data).entries()
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise MetadataError(f"{path} is not a readable GGUF file: {error}") from error


def drop_tensors(path: Path) -> None:
    """Shorten a GGUF file to its metadata, which is all that a tokenizer needs.

    Raises:
        MetadataError: as `read_metadata`; the file is not changed.
    """
    read_metadata(path)
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            cursor.entries()
        file.truncate(cursor.at)
        file.seek(_TENSOR_COUNT_AT)
        file.write(struct.pack("<Q", 0))


class _Cursor:
    """Reads values one after another; ``at`` is the position of the next one."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def entries(self) -> dict[str, Any]:
        magic = self._data[:4]
        version = self._take("I", skip=4)
        if magic != MAGIC or version not in (2, 3):
            raise MetadataError(
                f"it starts with {magic!r} and version {version}, not {MAGIC!r} and version 2 or 3"
            )
        _tensors, count = self._take("Q"), self._take("Q")
        return {self._string(): self._value(self._take("I")) for _ in range(count)}

    def _take(self, letter: str, *, skip: int = 0) -> Any:
        layout = struct.Struct(f"<{letter}")
        (value,) = layout.unpack_from(self._data, self.at + skip)
        self.at += skip + layout.size
        return value

    def _string(self) -> str:
        start = self.at + 8
        end = start + self._take("Q")
        if end > len(self._data):
            raise MetadataError("a string extends past the end of the file")
        self.at = end
        return self._data[start:end].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._take("I"), self._take("Q"))
        if kind not in _LETTERS:
            raise MetadataError(f"an entry has the unknown type {kind}")
        return self._take(_LETTERS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if count > len(self._data):
            raise MetadataError(f"an array has {count} items, more than the file has bytes")
        if kind not in _LETTERS:
            return [self._value(kind) for _ in range(count)]
        layout = struct.Struct(f"<{count}{_LETTERS[kind]}")
        values = layout.unpack_from(self._data, self.at)
        self.at += layout.size
        return list(values)


if __name__ == "__main__":
    drop_tensors(Path(sys.argv[1]))
