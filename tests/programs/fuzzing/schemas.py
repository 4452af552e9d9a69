"""JSON schemas and regular expressions that no compiler must fail on: mutated, malformed, huge."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.programs.fuzzing.documents import mutated
from tests.runtime.grammar.schemas import hostile_schemas, random_schema

_KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "patternProperties", "items"),
    *("prefixItems", "minItems", "maxItems", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"),
    *("pattern", "format", "minLength", "maxLength", "minimum", "maximum", "multipleOf", "$defs"),
    *("exclusiveMinimum", "exclusiveMaximum", "minProperties", "not", "if", "$id", "$schema"),
    *("$anchor", "x-guidance", "definitions", "contains", "uniqueItems", "dependentRequired"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1e308, -(2**63), 2**64, "", "string", "#", "#/$defs/a", "\0"),
    *([], [[]], {}, {"": {}}, [None], ["a", "a"], [{}], {"a": 1}, {"type": "string"}, "a" * 5000),
    *("http://localhost:1/x", "file:///etc/passwd", "https://json-schema.org/draft-07/schema#"),
)
_PATTERNS = (
    *("(", ")", "[", "[^", "a{", "a{2,1}", "a{99999999999}", "*", "\\", "\\p{Greek}", "\\p{X}"),
    *("(?=a)", "(?<!a)b", "(a)\\1", "(?P<n>a)", "^$", "^^", "$a", "(?i)É", "[z-a]", "\\u{110000}"),
    *("(a+)+$", "(a|a)*b", "(.*)*x", "((a{1,40}){1,40}){1,40}", "(x+x+)+y(.*a.{90}){3}"),
    *(
        ".{1000}",
        "(a?){300}a{300}",
        "[\\w-]{1,64}@([\\w-]{1,63}\\.){1,9}[a-z]{2,}",
        "\ud800",
        "é\0",
    ),
    *(
        "(((((((((((((((((((((a)))))))))))))))))))))",
        "[\U00010000-\U0010ffff]{50}",
        "|",
        "a||b",
        "",
    ),
)
_NAMES = ("é", "é", "名前", "\U0001f600", "\u202e", "\ufeff", "\0", "\ud83d", "a\nb", '"', "\\", "")


def fuzzed_schema(random: Random) -> bytes:
    """Return the JSON text of a schema, or of something else in its place; it may be no JSON."""
    weights = [weight for _, weight in _KINDS]
    (kind,) = random.choices([kind for kind, _ in _KINDS], weights)
    return kind(random)


def fuzzed_pattern(random: Random) -> str:
    """Return a regular expression, which may be malformed or take long to compile."""
    parts = [random.choice(_PATTERNS) for _ in range(random.choice((1, 1, 2, 3)))]
    return "".join(parts) + (f"{{{random.randint(0, 2000)}}}" if random.random() < 0.2 else "")


def _mutated(random: Random) -> bytes:
    return mutated(random_schema(random), random)


def _wrong_types(random: Random) -> bytes:
    """Return a valid schema in which some keywords have values of other types."""
    schema = random_schema(random)
    holders = [schema, *schema["properties"].values(), *schema["$defs"].values()]
    for _ in range(random.randint(1, 4)):
        random.choice(holders)[random.choice(_KEYWORDS)] = random.choice(_VALUES)
    return json.dumps(schema).encode()


def _nested(random: Random) -> bytes:
    depth = random.choice((5, 20, 31, 33, 60, 64, 65, 200, 2000, 9000))
    opening, closing = random.choice(
        (
            ('{"items":', "}"),
            ('{"anyOf":[', "]}"),
            ('{"allOf":[{"minLength":1},', "]}"),
            ('{"properties":{"a":', '},"required":["a"]}'),
            ('{"additionalProperties":', "}"),
            ("[", "]"),
        )
    )
    return (opening * depth + '{"type":"string"}' + closing * depth).encode()


def _large(random: Random) -> bytes:
    """Return a schema of up to 100 KB, which is above the limit."""
    count = random.choice((10, 300, 1000, 4000))
    salt = random.randrange(1 << 30)
    texts = [f"{random.choice(_NAMES)}{salt + at * 7919}" for at in range(count)]
    kind = random.randrange(4)
    if kind == 0:
        return json.dumps({"enum": texts}).encode()
    if kind == 1:
        properties = {text: {"type": "integer"} for text in texts}
        return json.dumps({"type": "object", "properties": properties}).encode()
    if kind == 2:
        branches = [{"type": "object", "properties": {text: {}}} for text in texts[:400]]
        return json.dumps({"anyOf": branches}).encode()
    return json.dumps({"type": "object", "required": texts}).encode()


def _pattern(random: Random) -> bytes:
    schema: dict[str, Any] = {"type": "string", "pattern": fuzzed_pattern(random)}
    if random.random() < 0.3:
        schema["maxLength"] = random.choice((0, 1, 30, 10**6, 10**12))
    if random.random() < 0.3:
        schema = {"type": "object", "patternProperties": {schema["pattern"]: schema}}
    return json.dumps(schema).encode()


def _numbers(random: Random) -> bytes:
    """Return bounds and divisors of numbers, for which automata can be large."""
    schema: dict[str, Any] = {"type": random.choice(("integer", "number"))}
    for name in random.sample(("minimum", "maximum", "exclusiveMaximum", "multipleOf"), 2):
        exponent = random.choice((-300, -9, -2, 0, 1, 2, 3, 9, 300))
        schema[name] = random.choice((-1, 1, 1)) * random.random() * 10.0**exponent
        if random.random() < 0.5 and abs(schema[name]) < 1e18:
            schema[name] = round(schema[name])
    return json.dumps(schema).encode()


def _recursive(random: Random) -> bytes:
    """Return definitions that refer to one another at random."""
    names = [f"d{at}" for at in range(random.randint(1, 12))]

    def reference() -> dict[str, Any]:
        return {"$ref": random.choice(("#", *(f"#/$defs/{name}" for name in names), "#/x", "#d0"))}

    def body() -> dict[str, Any]:
        some = [reference() for _ in range(random.randint(1, 3))]
        return random.choice(
            (
                {"type": "object", "properties": {"a": some[0]}, "required": ["a"]},
                {"type": "object", "properties": {"a": some[0], "b": some[-1]}},
                {"type": "array", "items": some[0], "minItems": random.choice((0, 1, 100))},
                {"anyOf": [*some, {"type": "null"}]},
                {"allOf": some},
                some[0],
            )
        )

    schema = {"$defs": {name: body() for name in names}, **body()}
    return json.dumps(schema).encode()


def _unicode(random: Random) -> bytes:
    names = ["".join(random.choices(_NAMES, k=random.randint(1, 9))) for _ in range(4)]
    schema = {
        "type": "object",
        "properties": {name: {"enum": [*names, f"{random.random()}"]} for name in names},
        "patternProperties": {names[0]: {"const": names[1]}},
        "additionalProperties": random.choice((True, False, {"pattern": names[2]})),
        "title": names[3],
    }
    return json.dumps(schema, ensure_ascii=random.random() < 0.5).encode(errors="surrogatepass")


def _hostile(random: Random) -> bytes:
    return random.choice([*hostile_schemas().values()]).encode()


_KINDS: tuple[tuple[Callable[[Random], bytes], float], ...] = (
    (_mutated, 30),
    (_wrong_types, 20),
    (_recursive, 10),
    (_pattern, 10),
    (_unicode, 10),
    (_nested, 8),
    (_large, 6),
    (_numbers, 5),
    (_hostile, 1),
)
"""Kinds of schemas with their weights."""
