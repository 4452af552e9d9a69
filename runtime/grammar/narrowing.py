"""Narrows JSON schemas to what clients expect of an answer, so that models end their answers.

A value that validates against the narrowed schema validates against the original one.
"""

from collections.abc import Mapping
from typing import Any

_MAX_LENGTHS = {"date-time": 35, "time": 24, "email": 100, "hostname": 253}
"""Maximum characters of values with a format: nine digits of a second, a long address, and the
limit of DNS. A model may otherwise write digits until ``max_tokens``."""
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
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DIGITS, _PLACES = 15, 10
"""Decimal digits that a double represents exactly, and decimal places that llguidance supports."""
_NEAR = 1e-6
"""Bounds that differ by less than this, or from zero, may need more decimal places."""
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
    pattern, and numbers with a bound a maximum number of digits.
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
    if (step := _step(schema)) is not None:
        found["multipleOf"] = step
    if _is_number(schema):
        found = _without_exclusive_zero(found, step or 10.0**-_DIGITS)
    return found


def _is_number(schema: Mapping[str, Any]) -> bool:
    """Return whether a value may be a number that is not an integer."""
    types = schema.get("type")
    return "number" in types if isinstance(types, list) else types in (None, "number")


def _without_exclusive_zero(schema: dict[str, Any], step: float) -> dict[str, Any]:
    """Replace an exclusive bound of 0 by an inclusive one of ``step`` or ``-step``.

    llguidance allows 0 in spite of it if the other bound is between -1 and 1.
    """
    found = dict(schema)
    for exclusive, inclusive, least in (
        ("exclusiveMinimum", "minimum", step),
        ("exclusiveMaximum", "maximum", -step),
    ):
        bound = found.get(exclusive)
        if type(bound) in (int, float) and bound == 0 and inclusive not in found:
            del found[exclusive]
            found[inclusive] = least
    return found


def _step(schema: Mapping[str, Any]) -> float | None:
    """Return the step of a number with a bound, so that a double represents the text of its values.

    With more digits, a number above an exclusive minimum, such as 1.00000000000000000001, is equal
    to it for most readers. A model may also write digits until ``max_tokens``.
    """
    bounds = [schema[name] for name in _BOUNDS if name in schema]
    if not bounds or {"multipleOf", "const", "enum"} & schema.keys() or not _is_number(schema):
        return None
    if not all(type(each) in (int, float) and abs(each) < 10.0**_DIGITS for each in bounds):
        return None
    if any(0 < abs(one - other) < _NEAR for one in bounds for other in (*bounds, 0)):
        return None
    digits = len(str(int(max(map(abs, bounds)))))
    return float(f"1e-{min(_DIGITS - digits, _PLACES)}")


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
