"""Calls of Llama 3.1, 3.2 and 3.3.

``{"name": …, "parameters": {…}}``, at the start of the output or after ``<|python_tag|>``. Several
calls are separated by semicolons.
"""

from collections.abc import Generator, Sequence

from services.gateway.output.call_grammar import CallSink, read_calls, read_space
from services.gateway.output.lark import Marks
from services.gateway.output.tool_format import CALLS, OPENING, ToolFormat, object_rule
from services.tokenizer.chat_template import ChatTemplate


class Llama3(ToolFormat):
    """JSON objects without tags."""

    name = "llama3"
    marker = "<|python_tag|>"
    marks = (marker,)
    bare = True

    def fits(self, template: ChatTemplate) -> bool:
        return "<|start_header_id|>" in template.source and "tools" in template.variables

    def block(self, sink: CallSink) -> Generator[None, str, str]:
        char = yield from read_space()
        return (yield from read_calls(sink, char))

    def rules(
        self,
        functions: Sequence[tuple[str, str]],
        marks: Marks,  # noqa: ARG002 - as in `ToolFormat`
        *,
        parallel: bool,
    ) -> list[str]:
        more = ' (";" " "? call)*' if parallel else ""
        return [f"{CALLS}: {OPENING} call{more}", object_rule(functions, "parameters")]
