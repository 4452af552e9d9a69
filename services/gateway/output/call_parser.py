"""Separates tool calls from the text around them while the output arrives."""

from collections.abc import Generator, Mapping
from itertools import groupby
from typing import Any

from services.gateway.output.call_grammar import NotACall
from services.gateway.output.parts import CallArguments, CallEnd, CallStart, Content, Part
from services.gateway.output.tool_format import ToolFormat
from services.gateway.text import overlap

_SPACE = " \t\r\n"


class CallParser:
    """Parses an output with calls in one format. It is also the `CallSink` of the format.

    Text that may be the beginning of a call is held. It becomes content if it is not one. White
    space is not content if there is nothing else before, between or after calls.

    Args:
        tools: schemas of the arguments of the tools that may be called, by name. A call of another
            tool is content.
    """

    def __init__(self, format: ToolFormat, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.tools = tools
        self._format = format
        self._parts: list[Part] = []
        # Text that was not processed, and the characters since the last part in a block.
        self._pending = ""
        self._held: list[str] = []
        self._block: Generator[None, str, object] | None = None
        self._is_start = format.bare
        # White space at the start of a text between calls; None after other text.
        self._blank: str | None = ""
        self._has_calls = False
        # Whether the last object in the block has begun to be a call, and whether the block has any
        # object.
        self._called = self._advanced = False

    def push(self, text: str) -> list[Part]:
        """Return the parts that are complete or can be continued after ``text``."""
        self._pending += text
        self._advance(final=False)
        return self._take()

    def finish(self) -> list[Part]:
        """Return the remaining parts at the end of the output."""
        self._advance(final=True)
        while self._block is not None:
            if self._called:  # the rest can only be a part of a mark
                self._held.clear()
            self._leave_block("")
            self._advance(final=True)
        if self._blank and not self._has_calls:
            self._parts.append(Content(self._blank))
        return self._take()

    def begin(self) -> None:
        self._called = False

    def start(self, name: str) -> None:
        self._accept()
        self._blank = ""
        self._has_calls = self._called = True
        self._parts.append(CallStart(name))

    def arguments(self, text: str) -> None:
        self._held.clear()
        self._parts.append(CallArguments(text))

    def end(self) -> None:
        self._held.clear()
        self._parts.append(CallEnd())

    def reject(self) -> None:
        self._content("".join(self._held))
        self._accept()

    def close(self) -> None:
        if not self._called:
            self._content("".join(self._held))
        self._accept()

    def _accept(self) -> None:
        self._held.clear()
        self._advanced = True

    def _advance(self, *, final: bool) -> None:
        while self._pending:
            if self._block is None and not self._find_block(final):
                return
            self._read_block()

    def _find_block(self, final: bool) -> bool:
        """Pass on the content before the next block; return whether the block begins."""
        text, marker, other = self._pending, self._format.marker, self._format.other_marker
        if self._is_start:
            bare = text.lstrip(_SPACE)
            if not bare and not final:
                return False
            self._is_start = False
            if bare.startswith("{"):
                self._content(text[: len(text) - len(bare)])
                self._enter_block([], bare)
                return True
        at, other_at = text.find(marker), text.find(other) if other else -1
        if at >= 0 and not 0 <= other_at < at:
            self._content(text[:at])
            self._enter_block([marker], text[at + len(marker) :])
            return True
        if other_at >= 0:
            self._content(text[:other_at])
            self._enter_block([], text[other_at:])
            return True
        partial = max(overlap(text, marker), overlap(text, other) if other else 0)
        at = len(text) - (0 if final else partial)
        self._content(text[:at])
        self._pending = text[at:]
        return False

    def _enter_block(self, held: list[str], rest: str) -> None:
        self._held, self._pending = held, rest
        self._called = self._advanced = False
        self._block = self._format.block(self)
        next(self._block)

    def _read_block(self) -> None:
        assert self._block is not None
        text, send = self._pending, self._block.send
        self._pending = ""
        for at, char in enumerate(text):
            self._held.append(char)
            try:
                send(char)
            except (StopIteration, NotACall):
                self._leave_block(text[at + 1 :])
                return

    def _leave_block(self, rest: str) -> None:
        """Go on with the text after the last part of the block, and then with ``rest``."""
        held = "".join(self._held)
        if not self._advanced and held:  # the block has no call: its start is content
            start = self._format.marker if held.startswith(self._format.marker) else held[0]
            self._content(start)
            held = held[len(start) :]
        self._held.clear()
        self._block = None
        self._pending = held + rest

    def _content(self, text: str) -> None:
        if not text:
            return
        if self._blank is not None:
            text = self._blank + text
            if not text.strip(_SPACE):
                self._blank = text
                return
            self._blank = None
        self._parts.append(Content(text))

    def _take(self) -> list[Part]:
        """Return the new parts; adjacent texts of a kind are joined."""
        joined: list[Part] = []
        for kind, group in groupby(self._parts, type):
            parts = list(group)
            texts = [part.text for part in parts if isinstance(part, Content | CallArguments)]
            if kind is Content:
                parts = [Content("".join(texts))]
            elif kind is CallArguments:
                parts = [CallArguments("".join(texts))]
            joined.extend(parts)
        self._parts.clear()
        return joined
