"""Calls of Qwen3-Coder: types of parameters, tags that models leave out, and values with tags."""

import json
from typing import Any

import pytest

from services.gateway.output.formats import TOOL_FORMATS, MessageFormats
from services.gateway.output.parameter_values import parameter_types
from services.gateway.output.parts import CallArguments, CallStart, Content
from services.tokenizer.chat_template import ChatTemplate
from tests.services.gateway.output.samples import Parsed, call, parse, parser

CODE = 'if a < b:\n    print("<tool_call>", "</parameter>", \'\\n\')\n\n'


def of(*parameters: tuple[str, str]) -> str:
    """Return a call of `f` as the chat template writes it."""
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    return f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"


def one(text: str) -> Parsed:
    whole = parse(parser("qwen3_coder"), [text])
    assert parse(parser("qwen3_coder"), list(text)) == whole
    return whole


def arguments_of(text: str) -> Any:
    """Return the arguments of the only call of a message without content."""
    message = one(text)
    ((name, arguments, is_complete),) = message.calls
    assert (name, is_complete, message.content) == ("f", True, "")
    assert message.finish == "tool_calls"
    return json.loads(arguments)


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("a", "Paris", "Paris"),
        ("a", "", ""),
        ("a", "5", "5"),
        ("a", "null", "null"),
        ("a", "  two\n\tlines \n", "  two\n\tlines \n"),
        ("a", CODE, CODE),
        ("a", '"quoted" \\ é 😀 \x00', '"quoted" \\ é 😀 \x00'),
        ("a", "&lt;b&gt;", "&lt;b&gt;"),
        ("count", "5", 5),
        ("count", " -12 ", -12),
        ("count", "2026-01-15", "2026-01-15"),
        ("size", "72.50", 72.5),
        ("size", "NaN", "NaN"),
        ("on", "true", True),
        ("on", "False", False),
        ("on", "TRUE", True),
        ("items", '[1, "</parameter>\\n", {"a": null}]', [1, "</parameter>\n", {"a": None}]),
        ("items", "['a', True, None]", ["a", True, None]),
        ("items", "[1, 2", "[1, 2"),
        ("map", '{"a": "</parameter></function>"}', {"a": "</parameter></function>"}),
        ("map", '{"a": "two\nlines"}', {"a": "two\nlines"}),
        ("map", "None", None),
        ("maybe", "null", None),
        ("maybe", "nul", "nul"),
        ("maybe", "nullable", "nullable"),
        ("maybe", "", ""),
        ("either", "5", 5),
        ("either", "5 o'clock", "5 o'clock"),
        ("either", "[5]", "[5]"),
        ("level", "low", "low"),
        ("level", "null", None),
        ("any", "5", "5"),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", "{a}", "{a}"),
        ("undeclared", "x", "x"),
        ("undeclared", "[1]", [1]),
    ],
)
def test_value_has_the_type_of_the_schema(name: str, written: str, value: object) -> None:
    assert arguments_of(of((name, written))) == {name: value}
    assert arguments_of(of(("b", "x"), (name, written), ("b", "y"))) == {"b": "y", name: value}
    assert '"72.50"' not in one(of((name, written))).calls[0][1], "numbers are not quoted"


def test_numbers_keep_their_digits() -> None:
    text = of(("size", "72.50"), ("count", "123456789012345678901234567890"))
    assert one(text).calls[0][1] == '{"size": 72.50, "count": 123456789012345678901234567890}'


def test_empty_value_of_another_type_than_string_is_left_out() -> None:
    assert arguments_of(of(("count", ""), ("a", "x"), ("items", " "))) == {"a": "x"}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=f><parameter=a>x</parameter><parameter=b>y</parameter></function>",
        "<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\ny\n</parameter>\n</function>",
        "<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\ny\n</parameter>\n</function>\n"
        "</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=b>\ny\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\ny\n</parameter>\n"
        "</tool_call>",
        "<tool_call>\n<function=f\n<parameter=a\nx\n</parameter>\n<parameter=b>y</parameter>"
        "</function>",
        "<tool_call><function= f >\n\n<parameter= a >x</parameter> \n<parameter=b>y</parameter>\n\n"
        "</function>\n\n</tool_call>\n",
    ],
)
def test_tags_may_be_missing(text: str) -> None:
    assert arguments_of(text) == {"a": "x", "b": "y"}


@pytest.mark.parametrize(
    "value",
    [
        "print('</function>')",
        "x <parameter=b> in the middle of a line",
        "a</parameter>b",
        "</parameter>\n</parameter>",
        "<function=f>\n<param",
        "</tool_call>",
        "<a>\n</a>\n<",
    ],
)
def test_value_may_have_tags(value: str) -> None:
    assert arguments_of(of(("a", value), ("b", ""))) == {"a": value, "b": ""}


def test_calls_in_a_row() -> None:
    expected = [call("f", '{"a": "x"}'), call("f", "{}")]
    first, second = of(("a", "x")), of()
    inner = second.removeprefix("<tool_call>\n")
    assert one(f"{first}\n{second}") == Parsed(calls=expected, finish="tool_calls")
    assert one(first.removesuffix("\n</tool_call>") + inner).calls == expected
    message = one(f"I call both.\n\n{first}\nAnd:\n{inner}\nDone.")
    assert message.calls == expected
    assert message.content == "I call both.\n\n\nAnd:\n\nDone."
    single = parse(parser("qwen3_coder", parallel=False), [f"{first}\n{second}"])
    assert single == Parsed(calls=expected[:1], finish="tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        of(("a", "x")).replace("function=f", "function=unknown"),
        of().replace("</function>", "Hello"),
        "<tool_call>\n<function=f>\nThe parameters are:",
        "<tool_call>\n<function=f>\n<parame",
        "Write <function=f> and then its <parameter=a>.",
        "<function=f<function=f>",
        "<function=" + "f" * 1000 + ">",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
    ],
)
def test_text_that_is_not_a_call_stays_content(text: str) -> None:
    assert one(text) == Parsed(content=text, finish="stop")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call>\n<function=f>\n<parameter=a>\nlong te", '{"a": "long te'),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx\n</para", '{"a": "x'),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n", '{"a": "x'),
        ("<tool_call>\n<function=f>\n<parameter=items>\n[1,", "{"),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b", '{"a": "x"'),
    ],
)
def test_cut_call_is_incomplete(text: str, arguments: str) -> None:
    assert one(text) == Parsed(calls=[call("f", arguments, end=False)], finish="stop")


def test_strings_are_streamed_and_other_values_are_sent_at_once() -> None:
    stream = parser("qwen3_coder")
    pieces = ["<tool_call>\n<func", "tion=f>\n<parameter=a>\none", " two\n", "three\n</par"]
    pieces += ["ameter>\n<parameter=items>\n[1", ", 2]\n</parameter>\n</function>"]
    parts = [stream.push(piece) for piece in pieces]
    assert parts[0] == []
    assert parts[1] == [CallStart("f"), CallArguments('{"a": "one')]
    assert parts[2:4] == [[CallArguments(" two")], [CallArguments("\\nthree")]]
    assert parts[4] == [CallArguments('"')]
    assert parts[5][0] == CallArguments(', "items": [1, 2]}')


def test_nullable_string_is_streamed_once_it_is_not_null() -> None:
    stream = parser("qwen3_coder")
    stream.push("<function=f>\n<parameter=maybe>\nnu")
    assert stream.push("m") == [CallArguments('"maybe": "num')]
    assert stream.push("ber") == [CallArguments("ber")]
    assert parser("qwen3_coder").push("a < b, ") == [Content("a < b, ")]


SCHEMA: dict[str, Any] = {
    "properties": {
        "reference": {"$ref": "#/$defs/names"},
        "itself": {"$ref": "#/properties/itself"},
        "one": {"oneOf": [{"const": "x"}, {"type": ["boolean", "null"]}]},
        "all": {"allOf": [{"description": "d"}, {"type": ["string", "null"]}, {"type": "string"}]},
        "unknown": {"anyOf": [{"type": "string"}, {}]},
        "object": {"properties": {}},
        "array": {"items": {}},
        "true": True,
        "wrong": {"type": 5, "enum": "x"},
    },
    "additionalProperties": {"type": "integer"},
    "$defs": {"names": {"type": "array"}},
}


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("reference", {"array"}),
        ("itself", set()),
        ("one", {"string", "boolean", "null"}),
        ("all", {"string"}),
        ("unknown", set()),
        ("object", {"object"}),
        ("array", {"array"}),
        ("true", set()),
        ("wrong", set()),
        ("other", {"number"}),
    ],
)
def test_types_of_schemas(name: str, types: set[str]) -> None:
    assert parameter_types(SCHEMA, name) == types
    nested = {"$ref": "#/$defs/root", "$defs": {"root": SCHEMA, **SCHEMA["$defs"]}}
    if name != "itself":
        assert parameter_types(nested, name) == types


def test_format_is_chosen_by_the_tags_in_the_template() -> None:
    source = "{{ tools }}<tool_call>\n<function=f>\n<parameter=a>"
    assert MessageFormats.of(ChatTemplate(source)).tools is TOOL_FORMATS["qwen3_coder"]
    other = source.replace("<tool_call>", "<seed:tool_call>")
    assert MessageFormats.of(ChatTemplate(other)).tools is None
    named = MessageFormats.of(ChatTemplate(other), "qwen3_coder")
    assert named.tools is TOOL_FORMATS["qwen3_coder"]
