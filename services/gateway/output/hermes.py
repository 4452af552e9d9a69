"""Calls of Hermes 2 Pro and 3, Qwen 2.5 and 3, QwQ and SmolLM3.

``<tool_call>{"name": …, "arguments": {…}}</tool_call>``
"""

from collections.abc import Generator, Sequence

from services.gateway.output.call_grammar import CallSink, read_calls, read_space, read_word
from services.gateway.output.lark import Marks
from services.gateway.output.tool_format import CALLS, OPENING, ToolFormat, object_rule
from services.tokenizer.chat_template import ChatTemplate

_START, _END = "<tool_call>", "</tool_call>"
_OTHER_CONTENTS = ("<arg_key>", "<function=", "<parameter=")
"""Tags in templates of models whose calls are not JSON, such as GLM-4.5 and Qwen3-Coder."""


def read_tagged(sink: CallSink) -> Generator[None, str, None]:
    """Read calls up to ``</tool_call>``. The end of the output may replace this tag."""
    char = yield from read_space()
    char = yield from read_calls(sink, char)
    yield from read_word(_END, char)
    sink.close()


class Hermes(ToolFormat):
    """JSON objects in tags."""

    name = "hermes"
    marker = _START
    marks = (_START, _END)

    def fits(self, template: ChatTemplate) -> bool:
        source = template.source
        return _START in source and not any(tag in source for tag in _OTHER_CONTENTS)

    def block(self, sink: CallSink) -> Generator[None, str, None]:
        return read_tagged(sink)

    def rules(
        self, functions: Sequence[tuple[str, str]], marks: Marks, *, parallel: bool
    ) -> list[str]:
        more = f' ("\\n"? {marks.exactly(_START)} body)*' if parallel else ""
        return [
            f"{CALLS}: {OPENING} body{more}",
            f'body: "\\n"? call "\\n"? {marks.exactly(_END)}',
            object_rule(functions, "arguments"),
        ]
