"""Calls of SmolLM2-Instruct, as its function calling instructions define them.

``<tool_call>[{"name": …, "arguments": {…}}, …]</tool_call>``

The chat template of SmolLM2 knows no tools. The instructions put them into the system message. The
results of calls are messages of the user, as Ollama writes them.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from services.gateway.output.call_grammar import CallSink
from services.gateway.output.hermes import Hermes, read_tagged
from services.gateway.output.lark import Marks
from services.gateway.output.tool_format import CALLS, OPENING, Messages, ToolFormat, object_rule
from services.tokenizer.chat_template import ChatTemplate

_INSTRUCTIONS = (
    "You are an expert in composing functions. You are given a question and a set of possible "
    "functions. \nBased on the question, you will need to make one or more function/tool calls to "
    "achieve the purpose. \nIf none of the functions can be used, point it out and refuse to "
    "answer. \nIf the given question lacks the parameters required by the function, also point it "
    "out.\n\nYou have access to the following tools:\n<tools>{tools}</tools>\n\n"
    "The output MUST strictly adhere to the following format, and NO other text MUST be included.\n"
    "The example format is as follows. Please make sure the parameter type is correct. If no "
    "function call is needed, please make the tool calls an empty list '[]'.\n"
    '<tool_call>[\n{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": '
    '"value2"}}}},\n... (more tool calls as required)\n]</tool_call>'
)


class SmolLM2(ToolFormat):
    """A list of JSON objects in tags."""

    name = "smollm2"
    marker = Hermes.marker
    marks = Hermes.marks
    describes_tools = True

    def fits(self, template: ChatTemplate) -> bool:
        return "named SmolLM" in template.source and "tools" not in template.variables

    def block(self, sink: CallSink) -> Generator[None, str, None]:
        return read_tagged(sink)

    def rules(
        self, functions: Sequence[tuple[str, str]], marks: Marks, *, parallel: bool
    ) -> list[str]:
        more = ' ("," ("\\n" | " ")? call)*' if parallel else ""
        return [
            f'{CALLS}: {OPENING} "[" "\\n"? call{more} "\\n"? "]" {marks.exactly(self.marks[1])}',
            object_rule(functions, "arguments"),
        ]

    def prepare(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Messages, Sequence[Mapping[str, Any]]]:
        prepared = [_without_calls(message) for message in messages]
        if not tools:
            return prepared, ()
        instructions = _INSTRUCTIONS.format(tools=json.dumps(list(tools), ensure_ascii=False))
        if prepared and prepared[0]["role"] == "system":
            own = _text(prepared.pop(0)["content"])
            instructions = f"{instructions}\n\n{own}" if own else instructions
        return [{"role": "system", "content": instructions}, *prepared], ()


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls, or whose result of a call, are text."""
    role, content = message["role"], message["content"]
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(content)}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        written = ",\n".join(
            json.dumps(
                {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
                ensure_ascii=False,
            )
            for call in calls
        )
        content = f"{_text(content)}<tool_call>[\n{written}\n]</tool_call>"
    return {"role": role, "content": content}


def _text(content: Any) -> str:
    """Return a content, which may be a list of text parts, as text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)
