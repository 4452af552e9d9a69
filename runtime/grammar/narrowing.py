"""Narrows JSON schemas to what clients expect of an answer, so that models end their answers.

A value that validates against the narrowed schema validates against the original one.
"""

from collections.abc import Mapping
from typing import Any

_MAX_LENGTHS = {"date-time": 35, "time": 24, "email": 254, "hostname": 253}
"""Maximum characters of values with a format: nine digits of a second, the limits of SMTP and DNS.
A model may otherwise write digits until ``max_tokens``."""
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
"""Two digits of a multiple of four that is not zero: of a leap year, or of its century."""
_DATE = (
    f"^(?:{_YEAR}-(?:(?:0[13-9]|1[0-2])-[0-9]{{2}}|02-(?:[01][0-9]|2[0-8]))|"
    f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_PATTERNS = {"date": _DATE, "date-time": f"{_DATE}[Tt]{_TIME}", "time": f"^{_TIME}"}
"""Patterns of values with a format: dates that exist, from the year 1 on, without leap seconds. RFC
3339 has the year 0 and leap seconds, but ``datetime`` of Python and other libraries refuse them."""
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
_OF_OBJECTS = (
    *("properties", "required", "additionalProperties", "patternProperties"),
    *("minProperties", "maxProperties"),
)
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "allOf", "anyOf", "oneOf")
"""Keywords whose values are schemas or lists of them. A value is generated for each of these."""


def narrowed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that allows no properties beside those that an object declares.

    That is the default of xgrammar. Objects with ``additionalProperties`` or
    ``patternProperties`` are left as they are, and so is the whole schema if it combines
    declarations of objects, as with ``allOf``. Values with some formats get a maximum length or a
    pattern.
    """
    found: dict[str, Any] = _narrowed(dict(schema), closes=not _combines_objects(schema))
    return found


def _narrowed(schema: Any, closes: bool) -> Any:
    if isinstance(schema, list):
        return [_narrowed(each, closes) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in _MAPS_OF_SCHEMAS:
        if isinstance(declared := schema.get(name), dict):
            found[name] = {key: _narrowed(value, closes) for key, value in declared.items()}
    for name in _SCHEMAS:
        if name in schema:
            found[name] = _narrowed(schema[name], closes)
    if closes and _is_open(schema):
        found["additionalProperties"] = False
    value_format = str(schema.get("format"))
    length = _MAX_LENGTHS.get(value_format)
    if length is not None and not {"minLength", "maxLength"} & schema.keys():
        found["maxLength"] = length
    if value_format in _PATTERNS and "pattern" not in schema:
        found["pattern"] = _PATTERNS[value_format]
    return found


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Return whether an object may have additional properties, and need not."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    if {"additionalProperties", "patternProperties", "minProperties"} & schema.keys():
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _combines_objects(schema: Any) -> bool:
    """Return whether a schema may apply several declarations to the same object."""
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            in_place = [value[name] for name in _IN_PLACE if name in value]
            of_objects = any(name in value for name in _OF_OBJECTS)
            all_of = value.get("allOf")
            several = isinstance(all_of, list) and len(all_of) > 1
            if several or len(in_place) + of_objects > 1:
                return True
            stack += value.values()
    return False
