"""Tool calls in each format, among them outputs on which other parsers fail."""

import json
import re
from pathlib import Path

import pytest

from services.gateway.output.formats import TOOL_FORMATS, MessageFormats
from services.tokenizer.chat_template import ChatTemplate
from tests.services.gateway.output.samples import Parsed, call, parse, parser

TEMPLATES = Path(__file__).parents[2] / "tokenizer/templates"
NESTED = '{"a": {"b": [1, {"c": "} ] \\" { [ \\\\"}]}}'
CODE = '{"code": "if x:\\n    print(\\"</tool_call>\\")"}'
LONG = json.dumps({"text": "ä\u2028😀" * 500}, ensure_ascii=False)


def one(tools: str, text: str, *, finish: str = "stop", parallel: bool = True) -> Parsed:
    return parse(parser(tools, parallel=parallel), [text], finish)


@pytest.mark.parametrize(
    "arguments", ["{}", '{"a":1}', NESTED, CODE, LONG, '{"e":"\\u00e9\\ud83d"}']
)
@pytest.mark.parametrize(
    ("tools", "form"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": %s}</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>\n'),
        ("hermes", '\n<tool_call>{"arguments":%s,"name":"f"}</tool_call>'),
        ("hermes", '<tool_call>[{"name":"f","arguments":%s}]</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": %s}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": %s'),
        ("hermes", '<tool_call>{"id": 1, "name" : "f" , "parameters" : %s , "x": [{}]}</tool'),
        ("smollm2", '<tool_call>[\n{"name": "f", "arguments": %s}\n]</tool_call>'),
        ("smollm2", '<tool_call>{"name": "f", "arguments": %s}</tool_call>'),
        ("llama3", '{"name": "f", "parameters": %s}'),
        ("llama3", '  {"type": "function", "name": "f", "parameters": %s}\n'),
        ("llama3", '<|python_tag|>{"name": "f", "arguments": %s}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": %s}]'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": %s, "id": "abcdefghi"}]\n'),
        ("mistral", "[TOOL_CALLS]f%s"),
        ("mistral", "[TOOL_CALLS]f[ARGS]%s"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]%s"),
    ],
)
def test_call_is_parsed(tools: str, form: str, arguments: str) -> None:
    message = one(tools, form % arguments)
    assert message == Parsed(calls=[call("f", arguments)], finish="tool_calls")


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call>\n' * 2),
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{}}\n{"name":"f","arguments":{}}</tool_call>',
        ),
        ("smollm2", '<tool_call>[{"name":"f","arguments":{}},\n{"name":"f"}]</tool_call>'),
        ("llama3", '{"name":"f","parameters":{}}; {"name":"f","parameters":{}}'),
        ("llama3", '<|python_tag|>{"name":"f"}<|python_tag|>{"name":"f"}'),
        ("mistral", '[TOOL_CALLS] [{"name":"f","arguments":{}}, {"name":"f","arguments":{}}]'),
        ("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS]f{}"),
    ],
)
def test_parallel_calls(tools: str, text: str) -> None:
    assert one(tools, text) == Parsed(calls=[call(), call()], finish="tool_calls")
    assert one(tools, text, parallel=False) == Parsed(calls=[call()], finish="tool_calls")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}', '{"a": "é"}'),
        ('{"name": "f", "arguments": {},}', "{}"),
        ('{"name": "\\u0066", "arguments": {}}', "{}"),
        ('{"name": "f", "arguments": {"a": "two\nlines"}}', '{"a": "two\nlines"}'),
        ('{"name": "f", "arguments": {"a": True}}', '{"a": True}'),
    ],
)
def test_unusual_arguments(written: str, arguments: str) -> None:
    for text in (f"<tool_call>{written}</tool_call>", f"<tool_call>{written}"):
        message = one("hermes", text)
        assert message == Parsed(calls=[call("f", arguments)], finish="tool_calls")


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "Use <tool_call> tags."),
        ("hermes", "a < b, <tool> <tool_calls> {}"),
        ("hermes", "<tool_call>f()</tool_call>"),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argu'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "na'),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("smollm2", "<tool_call>[]</tool_call>"),
        ("smollm2", "<tool_call>[1]</tool_call>"),
        ("llama3", 'The call is {"name": "f", "parameters": {}}'),
        ("llama3", '{"city": "Paris"}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", '[TOOL_CALLS] [{"name": "unknown", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]unknown{}"),
        ("mistral", "[TOOL_CALLS]f[OTHER]{}"),
        ("mistral", "[TOOL_CALLS]" + "f" * 1000 + "{}"),
        *((name, " \n") for name in TOOL_FORMATS),
        *((name, "") for name in TOOL_FORMATS),
    ],
)
def test_text_that_is_not_a_call_stays_content(tools: str, text: str) -> None:
    assert one(tools, text) == Parsed(content=text, finish="stop")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('Let me see.\n<tool_call>{"name":"f"}</tool_call>', "Let me see.\n"),
        ('<tool_call>{"name":"f"}</tool_call>\nDone.', "\nDone."),
        (' \n<tool_call>{"name":"f"}</tool_call> \n', ""),
        ('A<tool_call>{"name":"f"}</tool_call>B', "AB"),
        ('<tool_call>x<tool_call>{"name":"f"}</tool_call>', "<tool_call>x"),
    ],
)
def test_text_around_a_call_is_content(text: str, content: str) -> None:
    message = one("hermes", text)
    assert message == Parsed(content=content, calls=[call()], finish="tool_calls")


def test_unknown_tool_does_not_affect_other_calls() -> None:
    known, unknown = '{"name":"f","arguments":{}}', '{"name":"unknown","arguments":{}}'
    message = one("smollm2", f"<tool_call>[{unknown}, {known}]</tool_call>")
    assert message.calls == [call()]
    assert message.content == f"<tool_call>[{unknown}"
    message = one("smollm2", f"<tool_call>[{known}, {unknown}, {known}]</tool_call>")
    assert message.calls == [call(), call()]
    assert message.content == f", {unknown}"


def test_cut_call_is_incomplete() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "lon'
    expected = Parsed(calls=[call("f", '{"a": "lon', end=False)])
    for finish in ("stop", "length"):  # a stop string in the arguments, or the token limit
        expected.finish = finish
        assert one("hermes", text, finish=finish) == expected


def test_complete_calls_of_an_output_that_was_cut_keep_its_finish_reason() -> None:
    text = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert one("hermes", text, finish="length").finish == "length"


def test_mismatched_bracket_ends_the_call() -> None:
    message = one("hermes", '<tool_call>{"name":"f","arguments":{"a": ]}}</tool_call>')
    assert message.calls == [call("f", '{"a": ', end=False)]
    assert message.content == "]}}</tool_call>"
    assert message.finish == "stop"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("qwen-2.5", None),
        ("smollm-2", "smollm2"),
        ("llama-3.1", "llama3"),
        ("llama-3", None),
        ("mistral-v3", "mistral"),
        ("glm-4.5", None),
        ("kimi-k2", None),
        ("chatml", None),
    ],
)
def test_format_is_chosen_by_the_template(template: str, expected: str | None) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tools = MessageFormats.of(ChatTemplate(source)).tools
    assert (tools and tools.name) == expected


def test_hermes_is_chosen_by_its_tag_unless_the_content_is_not_json() -> None:
    hermes = '{{ tools }}<tool_call>\n{"name": <function-name>}\n</tool_call>'
    tools = MessageFormats.of(ChatTemplate(hermes)).tools
    assert tools is TOOL_FORMATS["hermes"]
    for other in ("<function=f>", "<arg_key>"):
        assert MessageFormats.of(ChatTemplate(hermes + other)).tools is None


def test_setting_overrides_the_template() -> None:
    template = ChatTemplate("{{ tools }}[TOOL_CALLS]")
    assert MessageFormats.of(template, "none").tools is None
    assert MessageFormats.of(template, "hermes").tools is TOOL_FORMATS["hermes"]
    assert MessageFormats.of(None, "auto").tools is None
    assert MessageFormats.of(ChatTemplate("{% for %}"), "auto").tools is None


def test_ids_are_those_that_templates_accept() -> None:
    for name, pattern in (("hermes", r"call_[0-9a-f]{24}"), ("mistral", r"[a-zA-Z0-9]{9}")):
        ids = {TOOL_FORMATS[name].new_id() for _ in range(100)}
        assert len(ids) == 100
        assert all(re.fullmatch(pattern, id) for id in ids)
