"""Random JSON schemas, as applications write them, and hostile ones."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

NAMES = ["name", "größe", "名前", "id", "value", "user_id", "a b", 'qu"ote', "emoji😀", "x"]
PATTERNS = [
    "^[a-z]{2,8}$",
    "^[A-Z][a-z]*( [A-Z][a-z]*)?$",
    r"^\d{3}-\d{4}$",
    "^(ja|nein|да|нет)$",
    "^[äöüß]{1,3}$",
    r"^#[0-9a-f]{6}$",
    r"^\w+@\w+\.(com|org)$",
]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]


def random_schema(random: Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema with an object at its root, and definitions that it refers to."""
    definitions = {f"D{at}": _value(random, 1, 0) for at in range(random.randint(1, 3))}
    schema = _object(random, depth, len(definitions))
    schema["$defs"] = definitions
    if random.random() < 0.2:  # a list that refers to itself
        definitions["Node"] = {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        schema["properties"]["node"] = {"$ref": "#/$defs/Node"}
    return schema


def _value(random: Random, depth: int, definitions: int) -> dict[str, Any]:
    kinds: list[Callable[[Random], dict[str, Any]]] = [_string, _string, _number, _enum, _plain]
    if definitions:
        kinds.append(lambda r: {"$ref": f"#/$defs/D{r.randrange(definitions)}"})
    if depth > 0:
        kinds += [
            lambda r: _object(r, depth - 1, definitions),
            lambda r: _array(r, depth - 1, definitions),
            lambda r: {
                "anyOf": [_value(r, depth - 1, definitions) for _ in range(r.randint(2, 3))]
            },
        ]
    return random.choice(kinds)(random)


def _object(random: Random, depth: int, definitions: int) -> dict[str, Any]:
    names = random.sample(NAMES, random.randint(1, 4))
    properties = {name: _value(random, depth, definitions) for name in names}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = [name for name in names if random.random() < 0.7]
    if random.random() < 0.8:
        schema["additionalProperties"] = False
    elif random.random() < 0.5:
        schema["additionalProperties"] = {"type": "integer"}
    return schema


def _array(random: Random, depth: int, definitions: int) -> dict[str, Any]:
    least = random.randint(0, 2)
    return {
        "type": "array",
        "items": _value(random, depth, definitions),
        "minItems": least,
        "maxItems": least + random.randint(0, 3),
    }


def _string(random: Random) -> dict[str, Any]:
    match random.randrange(4):
        case 0:
            return {"type": "string", "pattern": random.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": random.choice(FORMATS)}
        case 2:
            least = random.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 9)}
        case _:
            return {"type": "string", "maxLength": 20}


def _number(random: Random) -> dict[str, Any]:
    low = random.randint(-100, 100)
    kind = random.choice(["integer", "number"])
    schema: dict[str, Any] = {"type": kind, "minimum": low, "maximum": low + random.randint(1, 500)}
    if random.random() < 0.3:
        schema = {"type": kind, "exclusiveMinimum": low, "exclusiveMaximum": low + 50}
    return schema


def _enum(random: Random) -> dict[str, Any]:
    values = ["rot", "grün", "蓝", 3, 2.5, True, None, "a\nb", "😀"]
    if random.random() < 0.2:
        return {"const": random.choice(values)}
    return {"enum": random.sample(values, random.randint(1, 4))}


def _plain(random: Random) -> dict[str, Any]:
    return {"type": random.choice(["boolean", "null"])}


EXPLODING = json.dumps({"type": "integer", "multipleOf": 1234567, "maximum": 10**15})
"""A schema whose compilation takes half a minute or more, before it fails."""


def hostile_schemas() -> dict[str, str]:
    """Return schemas that are small, but that could take much time or memory, by name."""
    doubling: dict[str, Any] = {"d0": {"type": "string"}}
    merged: dict[str, Any] = {"d0": {"type": "string"}}
    for at in range(1, 40):
        below = {"$ref": f"#/$defs/d{at - 1}"}
        doubling[f"d{at}"] = {
            "type": "object",
            "properties": {"l": below, "r": below},
            "required": ["l", "r"],
            "additionalProperties": False,
        }
        merged[f"d{at}"] = {"allOf": [below, below]}
    choices = [{"anyOf": [{"required": [f"a{at}"]}, {"required": [f"b{at}"]}]} for at in range(24)]
    schemas: dict[str, Any] = {
        "doubling references": {"$defs": doubling, "$ref": "#/$defs/d39"},
        "doubling allOf": {"$defs": merged, "$ref": "#/$defs/d39"},
        "product of anyOf": {"allOf": choices},
        "reference to itself": {"$ref": "#"},
        "allOf of itself": {
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}},
            "$ref": "#/$defs/a",
        },
        "many items": {"type": "array", "minItems": 10**6, "maxItems": 10**9, "items": {}},
        "long string": {"type": "string", "minLength": 10**9},
        "nested repetition": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
        "backtracking": {"type": "string", "pattern": "(x+x+)+y(.*a.{200}){3}"},
        "many properties": {"type": "object", "properties": {f"p{n}": {} for n in range(3000)}},
        "large enum": {"enum": [f"v{n * 7919}" for n in range(4000)]},
    }
    return {name: json.dumps(schema) for name, schema in schemas.items()}
