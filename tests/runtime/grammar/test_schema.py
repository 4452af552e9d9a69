"""Preparation of JSON schemas: what answers to them may look like."""

import json
from calendar import monthrange
from itertools import combinations, product
from typing import Any

import pytest

from runtime.grammar.narrowing import narrowed
from runtime.grammar.spec import GrammarKind, InvalidGrammar
from tests.runtime.grammar.validation import faults
from tests.runtime.grammar.words import SIZE, grammar, matches

CLOSED = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
OPEN = {"type": "object", "properties": {"a": {}}}


def accepts(schema: dict[str, Any], text: str) -> bool:
    return matches(grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), SIZE), text)


def test_json_has_at_most_one_space_between_tokens() -> None:
    schema = {"type": "object"}
    for text in ('{"a":[1,"  x"]}', '{"a": [1, "\\n"]}', '{ "a" : [ ] }'):
        assert accepts(schema, text)
    for text in ('{"a":  1}', '{\n"a": 1}', '{"a":\t1}', ' {"a":1}', '{"a":1} '):
        assert not accepts(schema, text)


def test_objects_have_no_undeclared_properties_by_default() -> None:
    assert accepts(OPEN, '{"a": 1}')
    assert not accepts(OPEN, '{"a": 1, "b": 1}')
    assert accepts({**OPEN, "additionalProperties": True}, '{"a": 1, "b": 1}')
    assert accepts({**OPEN, "patternProperties": {"^b": {"type": "null"}}}, '{"b": null, "c": 1}')
    assert accepts({"type": "object"}, '{"b": 1}')
    assert accepts({**OPEN, "required": ["b"]}, '{"b": 1}'), "it may have the required one"
    least = {**OPEN, "required": ["a"], "minProperties": 2}
    assert accepts(least, '{"a": 1, "b": 1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": OPEN},
        {"type": "array", "prefixItems": [OPEN]},
        {"anyOf": [OPEN, {"type": "null"}]},
        {"allOf": [OPEN]},
        {"$ref": "#/$defs/o", "$defs": {"o": OPEN}},
        {"type": "object", "properties": {"properties": OPEN}, "additionalProperties": OPEN},
    ],
)
def test_objects_within_a_schema_are_closed(schema: dict[str, Any]) -> None:
    expected = json.loads(json.dumps(schema).replace(json.dumps(OPEN), json.dumps(CLOSED)))
    assert narrowed(schema) == expected != schema


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [OPEN, {"properties": {"b": {}}}]},
        {**OPEN, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        {**OPEN, "$ref": "#/$defs/o", "$defs": {"o": {"properties": {"b": {}}}}},
        {"properties": {"x": {"$ref": "#/$defs/o", "anyOf": [OPEN]}}, "$defs": {"o": OPEN}},
        {"const": {"properties": {"format": "email"}}, "$defs": {"not": {"format": 3}}},
    ],
)
def test_declarations_that_combine_and_data_are_left_as_they_are(schema: dict[str, Any]) -> None:
    assert narrowed(schema) == schema


def test_formats_with_digits_without_end_are_bounded() -> None:
    schema = {"type": "string", "format": "date-time"}
    assert accepts(schema, '"2024-01-31T12:00:00.123456789+01:00"')
    assert not accepts(schema, '"2024-01-31T12:00:00.1234567890+01:00"')
    assert accepts({**schema, "maxLength": 60}, '"2024-01-31T12:00:00.1234567890+01:00"')


def test_dates_exist() -> None:
    found = grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "date"}', SIZE)
    last_days = [31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    years = [1, 4, 100, 400, 1900, 2000, 2023, 2024, 9999]
    for year, (month, day) in product(years, enumerate(last_days, 1)):
        exists = monthrange(year, month)[1] >= day
        assert matches(found, f'"{year:04}-{month:02}-{day:02}"') == exists
        assert not matches(found, f'"{year:04}-{month:02}-{day + 1:02}"')
    for absent in ("0000-01-01", "0000-02-29", "2024-00-01", "2024-13-01", "2024-01-00"):
        assert not matches(found, f'"{absent}"')


@pytest.mark.parametrize(
    ("bounds", "valid", "invalid"),
    [
        (
            {"exclusiveMinimum": 83, "exclusiveMaximum": 133},
            ["83.0000000001", "132.9999999999", "100", "99.5"],
            ["83.00000000000000000001", "132.99999999999999999999", "83", "133"],
        ),
        ({"exclusiveMinimum": 0}, ["0.0000000001", "1234567.5"], ["0", "0.00000000001"]),
        ({"exclusiveMinimum": 123456789}, ["123456789.000001"], ["123456789.00000000000001"]),
        ({"exclusiveMinimum": 0, "maximum": 1e-9}, ["0.000000000000001"], ["0", "-0", "0.1"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0", "-0", "0.50001"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.1", "-0.5"], ["0", "-0.0", "-0"]),
        ({"exclusiveMinimum": 0, "maximum": 1, "multipleOf": 0.25}, ["0.25", "1"], ["0", "0.1"]),
        ({"minimum": 0.5, "maximum": 0.5000000001}, ["0.50000000001"], ["0.6"]),
        ({"minimum": 2.5, "multipleOf": 0.5}, ["2.5", "3"], ["2.25", "2.75"]),
        ({"maximum": 10**16}, ["1.25", "10000000000000000"], ["10000000000000001"]),
    ],
)
def test_bounded_numbers_have_the_digits_of_doubles(
    bounds: dict[str, Any], valid: list[str], invalid: list[str]
) -> None:
    for schema in ({"type": "number", **bounds}, {"type": ["null", "number"], **bounds}):
        assert [text for text in valid if not accepts(schema, text)] == []
        assert [text for text in invalid if accepts(schema, text)] == []
        assert all(not faults(json.loads(text), schema) for text in valid)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "minimum": 0, "enum": [0.12345678901]},
        {"type": "number", "exclusiveMinimum": False},
        {"type": "number", "minimum": "1"},
        {"type": "integer", "minimum": 1},
    ],
)
def test_other_numbers_are_left_as_they_are(schema: dict[str, Any]) -> None:
    assert narrowed(schema) == schema


def test_numbers_are_within_their_bounds() -> None:
    bounds = [-1, -0.5, 0, 0.5, 1, 2.5]
    values = ["0", "-0", "0.0", "0.5", "-0.5", "0.25", "1", "1.0", "-1", "2.5", "2.50", "2.51"]
    kinds = product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    for (low, high), (at_least, at_most) in product(combinations(bounds, 2), kinds):
        schema = {"type": "number", at_least: low, at_most: high}
        found = grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), SIZE)
        for text in values:
            assert not faults(json.loads(text), schema) or not matches(found, text)


def test_times_exist() -> None:
    time, both = ({"type": "string", "format": name} for name in ("time", "date-time"))
    assert accepts(both, '"2024-02-29T23:59:59.5+01:00"')
    assert accepts(time, '"23:59:59Z"')
    for absent in ("2023-02-29T00:00:00Z", "2024-02-29T23:59:60Z", "0000-01-01T00:00:00Z"):
        assert not accepts(both, f'"{absent}"')
    assert not accepts(time, '"23:59:60Z"')
    assert accepts({**both, "pattern": "Z$"}, '"2024-02-29T23:59:59Z"')


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "a\0b"},
        {"enum": [{"x": ["\x1f"]}, 1]},
        {"type": "string", "pattern": r"^a\x01b$"},
        {"type": "string", "pattern": r"a[\u007f]"},
        {"type": "string", "pattern": r"(\u{b}c)"},
        {"type": "object", "patternProperties": {r"x\a": {}}},
        {"type": "array", "items": {"anyOf": [{"const": "\x02"}, {"type": "null"}]}},
    ],
)
def test_control_characters_of_values_are_refused(schema: dict[str, Any]) -> None:
    """The texts of the grammar would lack them."""
    with pytest.raises(InvalidGrammar, match="control characters"):
        grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), SIZE)


def test_other_escapes_of_patterns_are_accepted() -> None:
    assert accepts({"const": "a\tb\n"}, '"a\\tb\\n"')
    assert accepts({"type": "string", "pattern": r"^[^\x00-\x1f]\x41\n$"}, '"bA\\n"')
    assert accepts({"type": "string", "pattern": r"^\\x01$"}, '"\\\\x01"')
    assert not accepts({"type": "string", "pattern": r"^a[\x01\x02]?b$"}, '"b"')
    assert accepts({"type": "string", "pattern": r"^a[\x01\x02]?b$"}, '"ab"')
