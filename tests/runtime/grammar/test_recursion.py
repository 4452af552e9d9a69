"""Recursive definitions of JSON schemas are nested a bounded number of times."""

import json
from typing import Any

import pytest

from runtime.grammar.recursion import LEVELS, bounded
from runtime.grammar.spec import GrammarKind
from tests.runtime.grammar.validation import faults
from tests.runtime.grammar.words import SIZE, grammar, matches

NODE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer"},
        "n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
    },
    "required": ["v", "n"],
    "additionalProperties": False,
}
LIST = {"$ref": "#/$defs/N", "$defs": {"N": NODE}}
OPTIONAL = {
    "type": "object",
    "properties": {"n": {"$ref": "#/definitions/O"}},
    "required": [],
    "definitions": {
        "O": {"type": "object", "properties": {"n": {"$ref": "#/definitions/O"}}, "required": []}
    },
}
TREE = {
    "$ref": "#/$defs/T",
    "$defs": {
        "T": {"type": "array", "items": {"$ref": "#/$defs/U"}},
        "U": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/T"}]},
    },
}


def nested(value: str, levels: int, last: str) -> str:
    """Return ``levels`` values within each other; each has the next at ``@``."""
    text = last
    for _ in range(levels):
        text = value.replace("@", text)
    return text


@pytest.mark.parametrize(
    ("schema", "value", "last", "levels"),
    [
        (LIST, '{"v":1,"n":@}', "null", LEVELS),
        (OPTIONAL, '{"n":@}', "{}", LEVELS),
        # A tree and its items take turns.
        (TREE, "[@]", "[]", LEVELS // 2 - 1),
        (TREE, "[7,@,7]", "[7]", LEVELS // 2 - 1),
    ],
)
def test_values_are_nested_up_to_the_bound(
    schema: dict[str, Any], value: str, last: str, levels: int
) -> None:
    found = grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), SIZE)
    for count in (0, 1, levels):
        text = nested(value, count, last)
        if not faults(json.loads(text), schema):
            assert matches(found, text)
    assert not matches(found, nested(value, levels + 2, last))


def test_definitions_that_refer_to_recursive_ones_are_bounded() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "required": ["a"],
        "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/N"}, "maxItems": 2}, "N": NODE},
    }
    found = grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), SIZE)
    inside = nested('{"v":1,"n":@}', LEVELS, "null")
    assert matches(found, f'{{"a":[{inside},{inside}]}}')
    deeper = nested('{"v":1,"n":@}', LEVELS + 1, "null")
    assert not matches(found, f'{{"a":[{deeper}]}}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "null"}}},
        {"properties": {"x": {"$ref": "#"}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"items": {"$ref": "#/$defs/a~1b"}}}},
        {"$ref": "#/$defs/N", "$defs": {"N": NODE, "N.3": {"type": "null"}}},
        {"$defs": 3},
        {
            "$ref": "#/$defs/L",
            "$defs": {"L": {**NODE, "description": "x" * 5000}, "N": {"$ref": "#/$defs/L"}},
        },
    ],
)
def test_other_schemas_are_left_as_they_are(schema: dict[str, Any]) -> None:
    assert bounded(schema) == schema


def test_data_are_left_as_they_are() -> None:
    data = {"const": {"$ref": "#/$defs/N"}}
    schema = {"anyOf": [data, {"$ref": "#/$defs/N"}], "$defs": {"N": NODE}}
    assert bounded(schema)["anyOf"][0] == data
