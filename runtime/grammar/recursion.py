"""Bounds the nesting of recursive definitions of JSON schemas, so that models end their answers.

A value that validates against the bounded schema validates against the original one.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.grammar.keywords import DATA

LEVELS = 16
"""Maximum number of values of recursive definitions within each other."""
_MAX_BYTES = 1 << 16
"""Maximum size of the copies of definitions. Schemas that would need more are not bounded."""
_ESCAPED = re.compile("[~/%]")
"""Characters that references contain in another form, or that separate their parts."""


def bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose recursive definitions are nested at most `LEVELS` times.

    There is a copy of each definition for each level, and none refers to itself. References to the
    root, to parts of definitions and from data are left as they are.
    """
    found = dict(schema)
    for keyword in ("$defs", "definitions"):
        found = _Definitions(found, keyword).bounded()
    return found


class _Definitions:
    """The definitions of a schema under one keyword."""

    def __init__(self, schema: dict[str, Any], keyword: str) -> None:
        self._schema, self._keyword = schema, keyword
        definitions = schema.get(keyword)
        self._definitions = definitions if isinstance(definitions, dict) else {}
        names = (name for name in self._definitions if not _ESCAPED.search(name))
        self._of_reference = {f"#/{keyword}/{name}": name for name in names}
        links = {name: set(self._references(own)) for name, own in self._definitions.items()}
        self._recursive = {name for name in links if name in _reachable(links, name)}

    def bounded(self) -> dict[str, Any]:
        recursive = {name: self._definitions[name] for name in self._recursive}
        if not recursive or len(json.dumps(recursive)) * LEVELS > _MAX_BYTES:
            return self._schema
        levels = range(1, LEVELS + 1)
        copies = {
            _copy(name, level): self._at(own, level + 1)
            for name, own in recursive.items()
            for level in levels
        }
        if copies.keys() & self._definitions.keys():
            return self._schema
        found: dict[str, Any] = self._at(self._schema, 1)
        # The originals are left for references that were not replaced.
        found[self._keyword] = {**found[self._keyword], **recursive, **copies}
        return found

    def _references(self, value: Any) -> Iterator[str]:
        """Yield the names of the definitions to which a schema refers."""
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str) and reference in self._of_reference:
                yield self._of_reference[reference]
        for each in _parts(value):
            yield from self._references(each)

    def _at(self, value: Any, level: int) -> Any:
        """Return a schema that refers to copies of recursive definitions at a level."""
        if isinstance(value, list):
            return [self._at(each, level) for each in value]
        if not isinstance(value, dict):
            return value
        reference = value.get("$ref")
        name = self._of_reference.get(reference) if isinstance(reference, str) else None
        found = {key: each if key in DATA else self._at(each, level) for key, each in value.items()}
        if name is not None and name in self._recursive:
            if level > LEVELS:
                return False
            found["$ref"] = f"#/{self._keyword}/{_copy(name, level)}"
        return found


def _copy(name: str, level: int) -> str:
    return f"{name}.{level}"


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        yield from value
    elif isinstance(value, dict):
        yield from (each for key, each in value.items() if key not in DATA)


def _reachable(links: Mapping[str, set[str]], name: str) -> set[str]:
    """Return the definitions to which one refers, directly or through others."""
    found: set[str] = set()
    left = [name]
    while left:
        for other in links[left.pop()] - found:
            found.add(other)
            left.append(other)
    return found
