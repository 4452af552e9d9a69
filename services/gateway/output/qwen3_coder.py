"""Calls of Qwen3-Coder, Qwen 3.5 and Nemotron 3, in tags for each parameter.

``<tool_call><function=…><parameter=…>…</parameter></function></tool_call>``

Strings are written as they are, without quotes or escapes. Models leave out tags now and then, and
write values that contain some: a tag in a value is one of the format only if another tag that may
follow it does, or at the start of a line.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from runtime.grammar.spec import LARK, GrammarKind, GrammarSpec
from services.gateway.output.call_grammar import CallSink, NotACall, read_space, read_word
from services.gateway.output.lark import Marks, quoted
from services.gateway.output.parameter_grammar import parameter_rules
from services.gateway.output.parameter_values import ParameterValue, parameter_types
from services.gateway.output.tool_format import CALLS, OPENING, ToolFormat
from services.tokenizer.chat_template import ChatTemplate

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_BETWEEN = (_PARAMETER, _FUNCTION_END, _END)
"""Tags before and after parameters. ``</tool_call>`` replaces a missing ``</function>``."""
_AFTER_LINE = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
"""Tags that end a value at the start of a line; the last two if ``</parameter>`` is missing."""
_SPACE = " \t\r\n"
_MAX_NAME_CHARS = 256


class Qwen3Coder(ToolFormat):
    """Tags for functions and parameters."""

    name = "qwen3_coder"
    marker = _START
    other_marker = _FUNCTION
    marks = (_START, _END)

    def fits(self, template: ChatTemplate) -> bool:
        return all(tag in template.source for tag in (_START, _FUNCTION, _PARAMETER))

    def block(self, sink: CallSink) -> Generator[None, str, None]:
        char = yield from read_space()
        yield from read_word(_FUNCTION, char)
        tag = yield from _read_call(sink)
        while tag != _END:
            char = yield from read_space()
            tag = yield from _read_tag((_FUNCTION, _END), char)
            if tag == _FUNCTION:
                tag = yield from _read_call(sink)
            elif tag == _END:
                sink.close()
            else:
                raise NotACall

    def rules(
        self, functions: Sequence[tuple[str, str]], marks: Marks, *, parallel: bool
    ) -> list[str]:
        more = f' ("\\n"? {marks.exactly(_START)} body)*' if parallel else ""
        calls = [
            f'{quoted(f"{_FUNCTION}{name}>")} "\\n" {arguments}' for name, arguments in functions
        ]
        end = quoted(_FUNCTION_END)
        return [
            f"{CALLS}: {OPENING} body{more}",
            f'body: "\\n"? call {end} "\\n"? {marks.exactly(_END)}',
            f"call: {' | '.join(calls)}",
        ]

    def argument_rules(self, rule: str, schema: Mapping[str, Any]) -> list[str]:
        return parameter_rules(rule, schema)

    def constraint(self, schema: Mapping[str, Any]) -> GrammarSpec:
        rules = ["start: arguments", *parameter_rules("arguments", schema)]
        return GrammarSpec(GrammarKind.GRAMMAR, "\n".join([LARK, *rules]))


class _Arguments:
    """The arguments of a call, as a JSON object, while they are read."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._separator = ""
        sink.arguments("{")

    def sender(self, name: str) -> Callable[[str], None]:
        """Return a function that sends a piece of the value of a parameter."""
        start = f"{json.dumps(name, ensure_ascii=False)}: "

        def send(text: str) -> None:
            nonlocal start
            if start:
                start = self._separator + start
                self._separator = ", "
            self._sink.arguments(start + text)
            start = ""

        return send

    def close(self) -> None:
        """End the object, and the call."""
        self._sink.arguments("}")
        self._sink.end()


def _read_call(sink: CallSink) -> Generator[None, str, str]:
    """Read a call after ``<function=``. Return the tag that ends it.

    Raises:
        NotACall: if the text is not a call, or if it has begun but cannot be continued.
    """
    name, char = yield from _read_name()
    if name not in sink.tools:
        raise NotACall
    sink.begin()
    char = yield from read_space()
    tag = yield from _read_tag(_BETWEEN, char)
    if tag not in _BETWEEN:
        raise NotACall
    sink.start(name)
    arguments = _Arguments(sink)
    while tag == _PARAMETER:
        key, char = yield from _read_name()
        value = ParameterValue(parameter_types(sink.tools[name], key), arguments.sender(key))
        tag = yield from _read_value(value, has_line=char == "\n")
        value.close()
    arguments.close()
    return tag


def _read_name() -> Generator[None, str, tuple[str, str]]:
    """Read a name in a tag. Return it and the character after it: ``>``, or a line break if the
    model has left that out."""
    name = ""
    char = yield
    while char not in ">\n":
        name += char
        if char == "<" or len(name) > _MAX_NAME_CHARS:
            raise NotACall
        char = yield
    return name.strip(_SPACE), char


def _read_tag(tags: Sequence[str], char: str) -> Generator[None, str, str]:
    """Read one of some tags, of which ``char`` is the first character.

    Return the tag, or else the text up to the first character that does not fit.
    """
    text = char
    while text not in tags and any(tag.startswith(text) for tag in tags):
        text += yield
    return text


def _read_value(value: ParameterValue, *, has_line: bool) -> Generator[None, str, str]:
    """Read a value. Return the tag after it, which is in `_BETWEEN`.

    The line breaks after ``<parameter=…>`` and before ``</parameter>`` are not parts of the value.

    Args:
        has_line: whether the first of these was read.
    """
    char = yield
    if char == "\n" and not has_line:
        char = yield
    held, starts_line = "", True
    while True:
        if char == "<" and (starts_line or not value.in_string):
            tag = yield from _read_tag(_AFTER_LINE if starts_line else (_PARAMETER_END,), char)
            if tag == _PARAMETER_END:
                held, tag = yield from _read_after_value(value, held)
            if tag in _BETWEEN:
                return tag
            text, char = held + tag[:-1], tag[-1]
            held, starts_line = "", False
            if text:
                value.write(text)
            continue
        if char == "\n":
            if held:
                value.write(held)
            held = char
        else:
            value.write(held + char)
            held = ""
        starts_line = char == "\n"
        char = yield


def _read_after_value(value: ParameterValue, held: str) -> Generator[None, str, tuple[str, str]]:
    """Read on after ``</parameter>``, which ends the value only before a tag in `_BETWEEN`.

    Return that tag. Otherwise, return text of the value that was not written, and the text that
    follows it.

    Args:
        held: the line break before the tag, if any.
    """
    while True:
        space = held + _PARAMETER_END
        char = yield
        while char in _SPACE:
            space += char
            char = yield
        tag = yield from _read_tag((*_BETWEEN, _PARAMETER_END), char)
        if tag != _PARAMETER_END:
            return space, tag
        held = "\n" if space.endswith("\n") else ""
        value.write(space.removesuffix("\n"))
