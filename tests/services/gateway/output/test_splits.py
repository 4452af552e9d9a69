"""A message does not depend on how its text was split, for any text and any format."""

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.output.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.services.gateway.output.samples import Parsed, parse, parser

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]"),
    *("<|python_tag|>", "<|python", "<think>", "</think>", "<think", "[THINK]", "[/THINK]"),
    *("{", "}", "[", "]", ",", ";", ":", '"', "\\", '\\"', " ", "\n", "\r\n", "\t", "1", "null"),
    *('"name"', '"arguments"', '"parameters"', '"f"', '"get_weather"', '"unknown"', "f", "id1"),
    *('{"name": "f", "arguments": {}}', '{"name":"f","parameters":{"a":[{"b":"}{"}]}}'),
    *('{"arguments": {"é": "\\u00e9"}, "name": "f"}', '{"name": "f", "arguments": "{}"}'),
    *('{"name": "unknown", "arguments": {}}', '{"name": "get_weather"}', '{"a": 1}'),
    *("<function=f>", "<function=", "</function>", "<parameter=a>", "<parameter=count>\n"),
    *("</parameter>", "\n</parameter>\n", "<parameter=map>", "<parameter=maybe>", "</param", "nu"),
    "<tool_call>\n<function=f>\n<parameter=either>\n5\n</parameter>\n</function>\n</tool_call>",
    *("Hello", "日本", "👩\u200d👧", "\u2028", "\x00", "e\u0301", "\ufffd"),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=24).map("".join)
formats = st.tuples(
    st.sampled_from([None, *TOOL_FORMATS]), st.sampled_from([None, *REASONING_FORMATS])
)
flags = st.fixed_dictionaries(
    {"is_open": st.booleans(), "parallel": st.booleans(), "include_reasoning": st.booleans()}
)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@settings(max_examples=600, deadline=None)
@given(texts, formats, flags, st.lists(st.integers(0, 200), max_size=8))
@example('<tool_call>{"name": "f"', ("hermes", None), {}, [3])
@example("<think", (None, "think"), {}, [1, 2, 3])
def test_message_does_not_depend_on_the_split(
    text: str, names: tuple[str | None, str | None], given_flags: dict[str, Any], cuts: list[int]
) -> None:
    whole = parse(parser(*names, **given_flags), [text])
    assert parse(parser(*names, **given_flags), list(text)) == whole
    assert parse(parser(*names, **given_flags), pieces_of(text, cuts)) == whole


@settings(max_examples=150, deadline=None)
@given(texts, formats, flags)
def test_message_does_not_depend_on_any_single_cut(
    text: str, names: tuple[str | None, str | None], given_flags: dict[str, Any]
) -> None:
    whole = parse(parser(*names, **given_flags), [text])
    for cut in range(len(text)):
        assert parse(parser(*names, **given_flags), [text[:cut], text[cut:]]) == whole


@settings(max_examples=300, deadline=None)
@given(texts, formats)
def test_output_without_calls_is_content(text: str, names: tuple[str | None, str | None]) -> None:
    message = parse(parser(names[0]), [text])
    if not message.calls:
        assert message == Parsed(content=text, finish="stop")


@settings(max_examples=300, deadline=None)
@given(texts, st.sampled_from([*TOOL_FORMATS]))
def test_text_outside_of_calls_is_kept_in_order(text: str, name: str) -> None:
    """The content and the arguments are subsequences of the output: nothing is invented."""
    message = parse(parser(name), [text])
    rest = iter(text)
    assert all(char in rest for char in message.content)


@settings(max_examples=150, deadline=None)
@given(texts, st.sampled_from([*REASONING_FORMATS]), st.booleans())
def test_reasoning_and_content_are_the_output_without_tags(
    text: str, name: str, is_open: bool
) -> None:
    form = REASONING_FORMATS[name]
    message = parse(parser(None, name, is_open=is_open), [text])
    begun = text.lstrip(" \t\r\n")
    if begun.startswith(form.start):
        body = begun.removeprefix(form.start)
    elif is_open:
        body = text
    else:
        assert (message.reasoning, message.content) == ("", text)
        return
    reasoning, _, content = body.partition(form.end)
    assert (message.reasoning, message.content) == (reasoning, content)


@settings(max_examples=30, deadline=5000)
@given(
    st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=5), st.sampled_from([*TOOL_FORMATS])
)
def test_repeated_fragments_take_linear_time(fragments: list[str], name: str) -> None:
    """A deadline of 5 s fails if text is scanned again for each marker in it."""
    text = "".join(fragments)
    parse(parser(name), [text * (60_000 // len(text))])
