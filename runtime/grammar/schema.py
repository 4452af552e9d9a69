"""Preparation of JSON schemas for the compiler."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from runtime.grammar.keywords import DATA
from runtime.grammar.narrowing import narrowed
from runtime.grammar.recursion import bounded
from runtime.grammar.spec import InvalidGrammar

_FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    }
)
"""Formats of JSON Schema 2020-12."""
_WHITESPACE = "[ ]?"
"""Whitespace between the tokens of a JSON text, as in Outlines. With more, models may generate
whitespace until ``max_tokens``."""
_ESCAPES = '"\\bfnrt'
"""Characters after a backslash in JSON strings. Without ``u`` and ``/``, each text has one
spelling, so that an additional property cannot have the name of a declared one."""
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON texts, or those of llguidance, have only as ``\\u`` escapes."""
_CONTROL_ITEM = rf"""(?: {_CONTROL.pattern} | \\ (?: [av]
    | (?: x | u00 | U000000 ) (?: 0[0-7bBeEfF] | 1[0-9a-fA-F] | 7[fF] )
    | [xuU]\{{0* (?: [0-7bBeEfF] | 1[0-9a-fA-F] | 7[fF] ) \}} ))"""
_PATTERN_ITEM = re.compile(
    rf"(?P<control> {_CONTROL_ITEM} | \[{_CONTROL_ITEM}\] )"
    r"| \\. | \[ (?: \\. | [^\]\\] )* \] | .",
    re.DOTALL | re.VERBOSE,
)
"""The next item of a regular expression: a character, an escape or a class. It has the group
``control`` if it matches only one of the characters `_CONTROL`."""
_MAX_BRANCHES = 256
"""Maximum number of branches of a ``oneOf`` that are compared."""


def prepared_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema as llguidance compiles it, with the options for it.

    Raises:
        InvalidGrammar: llguidance would generate values that do not validate.
    """
    if _has_control_characters(schema):
        raise InvalidGrammar(
            "control characters other than \\b, \\f, \\n, \\r and \\t are not supported in "
            "const, enum and pattern"
        )
    options = {
        "whitespace_pattern": _WHITESPACE,
        "json_allowed_escapes": _ESCAPES,
        "lenient": False,
        "coerce_one_of": one_of_is_any_of(schema),
    }
    return {**narrowed(bounded(without_unknown_formats(schema))), "x-guidance": options}


def one_of_is_any_of(schema: Any) -> bool:
    """Return whether each ``oneOf`` of a schema has the meaning of ``anyOf``.

    That is so if no value validates against two of its branches. Two branches are known to be
    disjoint if they have different types, or require a property with different constants, as the
    discriminator of a union has.
    """
    stack, seen = [schema], 0
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            branches = value.get("oneOf")
            if isinstance(branches, list):
                seen += len(branches)
                if seen > _MAX_BRANCHES or not _disjoint(branches, schema):
                    return False
            stack += value.values()
    return True


def without_unknown_formats(schema: Any) -> Any:
    """Return a copy of a schema without values of ``format`` that JSON Schema does not define.

    They have no meaning for validation, such as ``int32`` and ``password`` of OpenAPI.
    """
    if isinstance(schema, list):
        return [without_unknown_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in DATA else without_unknown_formats(value)
        for name, value in schema.items()
        if name != "format" or not isinstance(value, str) or value in _FORMATS
    }


def _has_control_characters(schema: Any) -> bool:
    """Return whether a string or pattern of a schema has a control character without an escape.

    llguidance leaves them out of texts, because `_ESCAPES` has no ``u``.
    """
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            patterns = [value.get("pattern"), *_names(value.get("patternProperties"))]
            if any(isinstance(each, str) and _matches_control(each) for each in patterns):
                return True
            data = [value[name] for name in ("const", "enum") if name in value]
            if any(map(_CONTROL.search, _strings(data))):
                return True
            stack += value.values()
    return False


def _matches_control(pattern: str) -> bool:
    return any(item["control"] for item in _PATTERN_ITEM.finditer(pattern))


def _names(value: Any) -> list[str]:
    return [*value] if isinstance(value, dict) else []


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value, without names of properties."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _disjoint(branches: Sequence[Any], root: Any) -> bool:
    resolved = [_resolve(branch, root) for branch in branches]
    return all(_differ(one, other) for one, other in combinations(resolved, 2))


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    kinds, others = _types(one), _types(other)
    if kinds and others and not kinds & others:
        return True
    values, more = _constants(one), _constants(other)
    if values is not None and more is not None:
        return not values & more
    if kinds != {"object"} or others != {"object"}:
        return False
    first, second = _required_constants(one), _required_constants(other)
    return any(not first[name] & second[name] for name in first.keys() & second.keys())


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of a schema; empty if any type is allowed or unknown."""
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return set()
    # An integer is a number as well.
    return {"number" if kind == "integer" else kind for kind in kinds}


def _constants(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the strings of ``const`` or ``enum``; None if other values are allowed."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    return set(values)


def _required_constants(schema: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the constants of each required property that has some."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return {}
    found = {}
    for name in required:
        own = properties.get(name) if isinstance(name, str) else None
        constants = _constants(own) if isinstance(own, dict) else None
        if constants is not None:
            found[name] = constants
    return found


def _resolve(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return a schema, or the one that its ``$ref`` within the document names; else empty."""
    for _ in range(8):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        reference = schema["$ref"]
        if len(schema) > 1 or not isinstance(reference, str) or not reference.startswith("#/"):
            return {}
        schema = root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}
