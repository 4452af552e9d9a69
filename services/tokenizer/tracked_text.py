"""Strings that record which of their characters a chat template wrote.

A chat template joins its own text, which contains special tokens, with text of the client. For the
template, all of it is ordinary text: comparisons, lengths and methods give the results of `str`.

The characters of a `TrackedText` are either written by the template or not. All other strings count
as text of the client. An operation that is not tracked returns such a string. Text of a client is
therefore never taken for text of the template.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from string import Formatter
from typing import Any, Self, SupportsIndex

_DIRECTIVE = re.compile(r"(%(?:\(\w*\))?[^a-zA-Z%]*[a-zA-Z%])")


class TrackedText(str):
    """A string with a mask, of the same length, of the characters that the template wrote."""

    __slots__ = ("_mask",)
    _mask: str

    def __new__(cls, text: str, mask: str | None = None) -> Self:
        """Return a string; without a mask, none of its characters is from the template."""
        tracked = super().__new__(cls, text)
        tracked._mask = "0" * len(text) if mask is None else mask
        return tracked

    @classmethod
    def from_template(cls, text: str) -> Self:
        """Return a string that the template wrote."""
        return cls(text, "1" * len(text))

    def __str__(self) -> str:
        return self  # `str(text)`, which templates call for all output, keeps the mask

    def __add__(self, other: str) -> Any:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return TrackedText(str.__add__(self, other), self._mask + mask_of(other))

    def __radd__(self, other: Any) -> Any:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return TrackedText(str.__add__(other, self), mask_of(other) + self._mask)

    def __mul__(self, count: SupportsIndex) -> Any:
        return TrackedText(str.__mul__(self, count), self._mask * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> Any:
        plain = str.__mod__(self, values)
        if "0" in self._mask:
            return plain
        try:
            return _same(plain, join(self._directives(values)))
        except (TypeError, ValueError, LookupError):  # such as a width that is an argument
            return plain

    def __getitem__(self, key: Any) -> Any:
        return TrackedText(str.__getitem__(self, key), self._mask[key])

    def __iter__(self) -> Iterator[Any]:
        return map(TrackedText, str.__iter__(self), self._mask)

    def join(self, items: Iterable[str]) -> Any:
        items = list(items)
        plain = str.join(self, items)
        return TrackedText(plain, self._mask.join(map(mask_of, items)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> Any:
        plain = str.replace(self, old, new, count)
        if not old:
            return plain
        return _same(plain, join(self.split(old, count), new))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> Any:
        return self._parts(str.split(self, sep, maxsplit), sep or "")

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> Any:
        return self._parts(str.rsplit(self, sep, maxsplit), sep or "")

    def splitlines(self, keepends: bool = False) -> Any:
        return self._parts(str.splitlines(self, keepends))

    def partition(self, sep: str) -> Any:
        return tuple(self._parts(str.partition(self, sep)))

    def rpartition(self, sep: str) -> Any:
        return tuple(self._parts(str.rpartition(self, sep)))

    def lstrip(self, chars: str | None = None) -> Any:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> Any:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None) -> Any:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> Any:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str) -> Any:
        return self[: len(str.removesuffix(self, suffix))]

    def lower(self) -> Any:
        return self._converted(str.lower)

    def upper(self) -> Any:
        return self._converted(str.upper)

    def title(self) -> Any:
        return self._converted(str.title)

    def capitalize(self) -> Any:
        return self._converted(str.capitalize)

    def _converted(self, convert: Callable[[str], str]) -> str:
        plain = convert(self)
        return TrackedText(plain, self._mask) if len(plain) == len(self) else plain

    def _parts(self, parts: Iterable[str], separator: str = "") -> list[str]:
        """Return ``parts``, which must occur in the text in this order, with their masks."""
        found = []
        at = 0
        for part in parts:
            at = self.find(part, at)
            found.append(self[at : at + len(part)])
            at += len(part) + len(separator)
        return found

    def _directives(self, values: Any) -> Iterator[str]:
        """Yield the parts of a ``%`` format: its text, and the values in place of ``%s`` etc."""
        left = list(values) if isinstance(values, tuple) else [values]
        for index, part in enumerate(_DIRECTIVE.split(self)):
            if index % 2 == 0:
                yield TrackedText.from_template(part)
            elif part.startswith("%("):
                yield str.__mod__(part, values)
            elif part == "%%":
                yield "%"
            else:
                value = left.pop(0)
                tracked = part == "%s" and isinstance(value, str)
                yield value if tracked else str.__mod__(part, (value,))


def mask_of(text: str) -> str:
    """Return a string of "1" for each character that the template wrote, and of "0" for others."""
    return text._mask if isinstance(text, TrackedText) else "0" * len(text)


def join(items: Iterable[str], separator: str = "") -> str:
    """Join strings as `str.join` does."""
    items = list(items)
    plain = str.join(separator, items)
    if not isinstance(separator, TrackedText) and not any(
        isinstance(item, TrackedText) for item in items
    ):
        return plain
    return TrackedText(plain, mask_of(separator).join(map(mask_of, items)))


def format_fields(
    formatter: Formatter, text: str, args: Sequence[Any], named: Mapping[str, Any]
) -> str:
    """Return ``text.format(*args, **named)``, with the fields that ``formatter`` looks up."""
    plain = formatter.vformat(text, args, named)
    if "0" in mask_of(text):
        return plain
    pieces: list[str] = []
    numbers = count()
    for literal, field, spec, conversion in formatter.parse(text):
        pieces.append(TrackedText.from_template(literal))
        if field is None:
            continue
        name = field or str(next(numbers))
        if spec or conversion:
            convert = f"!{conversion}" if conversion else ""
            pieces.append(formatter.vformat(f"{{{name}{convert}:{spec}}}", args, named))
        else:
            pieces.append(str(formatter.get_field(name, args, named)[0]))
    return _same(plain, join(pieces))


def _same(plain: str, tracked: str) -> str:
    return tracked if tracked == plain else plain
