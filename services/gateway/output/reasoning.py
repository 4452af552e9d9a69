"""Separates the reasoning block at the start of an output from the answer."""

from dataclasses import dataclass

from services.gateway.output.parts import Content, Part, Reasoning
from services.gateway.text import overlap
from services.tokenizer.chat_template import ChatTemplate

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class ReasoningFormat:
    """Tags of a reasoning block.

    Attributes:
        name: name in the setting ``reasoning_parser``.
        gap: white space that models write after the end tag.
    """

    name: str
    start: str
    end: str
    gap: str

    def fits(self, template: ChatTemplate) -> bool:
        """Return whether models with this chat template write such blocks."""
        return self.start in template.source or self.end in template.source

    def is_open(self, prompt: str) -> bool:
        """Return whether a prompt ends in a block, because the template wrote the start tag."""
        return prompt.rstrip(_SPACE).endswith(self.start)

    def is_unclosed(self, message: str) -> bool:
        """Return whether a message that the model continues ends in a block."""
        return message.rfind(self.start) > message.rfind(self.end)


THINK = ReasoningFormat("think", "<think>", "</think>", "\n\n")
"""Blocks of DeepSeek-R1, Qwen 3, QwQ, GLM-4.5, MiniMax-M2 and SmolLM3."""
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]", "")
"""Blocks of Magistral."""


class ReasoningParser:
    """Parses one output. Only a block at its start is reasoning, after optional white space.

    Text that may be a part of a tag is held.

    Args:
        is_open: whether the output begins in a block; a repeated start tag is then dropped.
        gap: white space after a block that is not content.

    Attributes:
        end: position in the output, in characters, at which the block and its tag end. 0 if there
            is no block, None as long as the next text may belong to one.
    """

    def __init__(self, format: ReasoningFormat, *, is_open: bool, gap: str = "") -> None:
        self._format = format
        self._held = ""
        self._at_start = True
        self._is_open = is_open
        self._gap = gap
        self._in_gap = False
        self._length = 0
        self.end: int | None = None

    def push(self, text: str) -> list[Part]:
        """Return the new text: content after the block, or without one."""
        self._length += len(text)
        if self._in_gap:
            return self._skip_gap(text)
        if not self._at_start and not self._is_open:
            return [Content(text)] if text else []
        self._held += text
        if self._at_start:
            begun = self._held.lstrip(_SPACE)
            start = self._format.start
            if start.startswith(begun) and begun != start:
                return []
            self._at_start = False
            if begun.startswith(start):
                self._is_open = True
                self._held = begun[len(start) :]
        return self._split() if self._is_open else self.finish()

    def finish(self) -> list[Part]:
        """Return the held text at the end of the output."""
        if not self._is_open and self.end is None:
            self.end = 0
        text, self._held = self._held, ""
        if not text:
            return []
        return [Reasoning(text) if self._is_open else Content(text)]

    def _split(self) -> list[Part]:
        """Return the reasoning up to the end tag, and the content after it."""
        reasoning, tag, content = self._held.partition(self._format.end)
        if tag:
            self._held, self._is_open = "", False
            self.end = self._length - len(content)
        else:
            cut = len(reasoning) - overlap(reasoning, self._format.end)
            reasoning, self._held = reasoning[:cut], reasoning[cut:]
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        if tag:
            self._in_gap = True
            parts += self._skip_gap(content)
        return parts

    def _skip_gap(self, text: str) -> list[Part]:
        """Return the content after the gap, or hold what may be its beginning."""
        self._held += text
        if self._gap.startswith(self._held) and self._held != self._gap:
            return []
        self._in_gap = False
        content, self._held = self._held.removeprefix(self._gap), ""
        return [Content(content)] if content else []
