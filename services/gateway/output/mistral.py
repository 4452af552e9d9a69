"""Calls of Mistral's models.

``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or in newer ones ``[TOOL_CALLS]name{…}`` and
``[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}``.
"""

import secrets
import string
from collections.abc import Generator, Sequence

from services.gateway.output.call_grammar import (
    CallSink,
    NotACall,
    read_arguments,
    read_calls,
    read_space,
)
from services.gateway.output.lark import Marks, quoted
from services.gateway.output.tool_format import CALLS, OPENING, ToolFormat, object_rule
from services.tokenizer.chat_template import ChatTemplate

_CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"
_ID_CHARS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Characters of an id; Mistral's chat templates reject others."""
_MAX_CHARS = 256
"""Maximum characters of a name or an id in the output."""


class Mistral(ToolFormat):
    """A list of JSON objects, or names and JSON arguments."""

    name = "mistral"
    marker = "[TOOL_CALLS]"
    marks = (marker, _CALL_ID, _ARGS)

    def fits(self, template: ChatTemplate) -> bool:
        return self.marker in template.source

    def block(self, sink: CallSink) -> Generator[None, str, str]:
        char = yield from read_space()
        if char in "[{":
            return (yield from read_calls(sink, char))
        name, char = yield from _read_until("[{", char)
        while char == "[":
            tag, char = yield from _read_until("]", char)
            char = yield from read_space()
            if tag + "]" == _CALL_ID:
                _, char = yield from _read_until("[", char)
            elif tag + "]" != _ARGS:
                raise NotACall
        return (yield from read_arguments(sink, name.rstrip(), char))

    def rules(
        self, functions: Sequence[tuple[str, str]], marks: Marks, *, parallel: bool
    ) -> list[str]:
        id_and_mark = f"({marks.exactly(_CALL_ID)} CALL_ID)? {marks.exactly(_ARGS)}"
        named = [f"{quoted(name)} ({id_and_mark})? {arguments}" for name, arguments in functions]
        more = (' ("," " "? call)*', f" ({marks.exactly(self.marker)} named)*")
        listed, repeated = more if parallel else ("", "")
        return [
            f'{CALLS}: {OPENING} (" "? "[" call{listed} "]" | named{repeated})',
            f"named: {' | '.join(named)}",
            f"CALL_ID: /[a-zA-Z0-9]{{{_ID_LENGTH}}}/",
            object_rule(functions, "arguments"),
        ]

    def new_id(self) -> str:
        return "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))


def _read_until(ends: str, char: str) -> Generator[None, str, tuple[str, str]]:
    """Return the text from ``char`` on, and the first character that is in ``ends``."""
    text = ""
    while char not in ends:
        text += char
        if len(text) > _MAX_CHARS:
            raise NotACall
        char = yield
    return text, char
