"""Grammars of parameters in tags: what they allow is parsed to arguments that validate."""

import json
from functools import cache
from typing import Any

import pytest

from runtime.grammar.compiler import compile_grammar
from runtime.grammar.spec import GrammarBounds, GrammarFault, InvalidGrammar
from runtime.grammar.vocabulary import GrammarVocabulary
from services.common.model_source import resolve_model
from services.gateway.output.call_parser import CallParser
from services.gateway.output.formats import TOOL_FORMATS
from services.gateway.output.message_parser import MessageParser
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer
from tests.runtime.grammar.validation import faults
from tests.services.gateway.output.samples import parse

FORMAT = TOOL_FORMATS["qwen3_coder"]


@cache
def vocabulary() -> tuple[Tokenizer, GrammarVocabulary]:
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    return tokenizer, GrammarVocabulary(tokenizer.json, tokenizer.vocab_size, tokenizer.eos_ids)


def allows(schema: dict[str, Any], text: str) -> bool:
    """Return whether the parameters of a call may be this text."""
    tokenizer, words = vocabulary()
    found = compile_grammar(FORMAT.constraint(schema), words, GrammarBounds()).start()
    found.advance(tokenizer.encode(text, add_special=False))
    return not found.error and bool(found.inner.is_accepting())


def written(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def arguments_of(schema: dict[str, Any], parameters: str) -> Any:
    parser = MessageParser(None, CallParser(FORMAT, {"f": schema}))
    text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    ((_, arguments, is_complete),) = parse(parser, [text]).calls
    assert is_complete
    return json.loads(arguments)


TREE = {"type": "array", "items": {"$ref": "#/$defs/tree"}}
ROOT = {"$defs": {"unit": {"enum": ["C", "F"]}, "tree": TREE}}


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"type": "string"}, ["", "x", "\n", "two\nlines\n", '"', "é 😀", "<b>"], []),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
        ({"type": "string", "pattern": "^[a-z/]+$"}, ["ab/c"], ["", "aB", "a b"]),
        ({"type": "string", "pattern": "b+"}, ["b", "abbc"], ["ac"]),
        ({"type": "string", "pattern": "^(a|b)$"}, ["a", "b"], ["ab", "c"]),
        ({"type": "string", "pattern": "^a", "maxLength": 2}, ["a", "ab"], ["b", "abc"]),
        ({"type": "string", "format": "int32"}, ["x"], []),
        ({"type": "string", "format": "date"}, ["2026-11-29"], ["today", "2026-13-01"]),
        ({"type": "string", "format": "time"}, ["23:59:00Z"], ["24:00:00Z", "1:2"]),
        ({"type": "string", "format": "date-time"}, ["2026-11-29T08:30:00.5+01:00"], ["2026"]),
        ({"type": "string", "format": "uuid"}, ["0" * 8 + "-0000-4000-8000-" + "f" * 12], ["f"]),
        ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
        ({"type": "string", "format": "email"}, ["a.b@example.com"], ["a", "a@b@c"]),
        ({"type": "string", "format": "uri"}, ["https://example.com/a?b=c#d"], ["a b", "x"]),
        ({"enum": ["low", "high", "", None, 3]}, ["low", "high", "", "null", "3"], ["lo", "4"]),
        ({"const": "x"}, ["x"], ["y", ""]),
        ({"$ref": "#/$defs/unit"}, ["C", "F"], ["K"]),
        ({"$ref": "#/$defs/tree"}, ["[]", "[[], [[]]]"], ["[1]"]),
        ({"type": "integer", "minimum": 3}, ["3", "14"], ["2", "x", "3.5", ""]),
        ({"type": "boolean"}, ["true", "false"], ["True"]),
        ({"type": "array", "items": {"$ref": "#/$defs/unit"}}, ['["C", "F"]', "[]"], ['["K"]']),
        ({"type": "object", "properties": {"a": {"type": "null"}}}, ['{"a": null}', "{}"], ["x"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["null", "x"], []),
        ({"anyOf": [{"enum": ["a"]}, {"type": "integer"}]}, ["a", "-5"], ["b", "5.5"]),
        ({"type": ["string", "null"], "maxLength": 3}, ["abc", "null"], ["abcd"]),
        ({"oneOf": [{"const": "on"}, {"const": False}]}, ["on", "false"], ["true", "off"]),
        ({"title": "Any"}, ["x", "5", "[1]"], []),
        (True, ["x", "[1]"], []),
    ],
    ids=str,
)  # fmt: skip
def test_values_follow_their_schema(value: Any, good: list[str], bad: list[str]) -> None:
    schema = {"type": "object", "properties": {"p": value}, "required": ["p"], **ROOT}
    for text in good:
        assert allows(schema, written("p", text)), text
        assert not faults(arguments_of(schema, written("p", text)), schema), text
    for text in bad:
        assert not allows(schema, written("p", text)), text
    for tag in ("</parameter>", "<parameter=q>", "</function>"):
        assert not allows(schema, written("p", f"a{tag}b"))
    assert not allows(schema, "")


def test_optional_parameters_may_be_missing() -> None:
    integer = {"type": "integer"}
    schema = {"properties": {"a": integer, "b": integer, "c": False}, "required": ["b"]}
    one, two = written("a", "1"), written("b", "2")
    assert allows(schema, one + two)
    assert allows(schema, two)
    for text in ("", one, two + one, one + one + two, two + written("d", "3")):
        assert not allows(schema, text)
    assert allows({"type": "object", "properties": {}}, "")
    assert allows({"type": "object", "additionalProperties": False}, "")
    assert not allows({"type": "object", "additionalProperties": False}, one)


def test_parameters_that_are_not_declared() -> None:
    integer = {"type": "integer"}
    schema = {"properties": {"a.b": {"type": "string"}}, "additionalProperties": integer}
    assert allows(schema, written("a.b", "x") + written("acb", "1") + written("é d", "2"))
    assert not allows(schema, written("other", "x"))
    assert not allows(schema, written("other", "1") + written("a.b", "1"))
    for free in ({"type": "object"}, {"properties": {}, "additionalProperties": True}):
        assert allows(free, written("x", "any\ntext") + written("y", "[1]"))
        assert allows(free, "")
        assert not allows(free, "x")


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"required": ["a"]}]},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a>b": {}}},
        {"properties": {"a": {"enum": ["</parameter>"]}}},
        {"properties": {"a": {"type": "string", "pattern": "^a|b$"}}},
        {"properties": {"a": {"not": {"type": "string"}}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}], "maxLength": 3}}},
        {"properties": {"a": {"type": "string", "format": "regex"}}},
        {"properties": []},
        {"patternProperties": {"a": {}}},
    ],
    ids=str,
)
def test_schemas_that_the_format_cannot_follow(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidGrammar) as found:
        FORMAT.constraint({"type": "object", **schema})
    assert found.value.fault is GrammarFault.UNSUPPORTED


@pytest.mark.parametrize("pattern", ["a(?=b)", "(", "a^b"])
def test_patterns_that_are_not_supported(pattern: str) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}}}
    with pytest.raises(InvalidGrammar):
        compile_grammar(FORMAT.constraint(schema), vocabulary()[1], GrammarBounds())
