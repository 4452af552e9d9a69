"""The answer to a chat as a sequence of blocks, for interfaces other than chat completions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from services.gateway.http.messages import Messages
from services.gateway.output.parts import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Part,
    Reasoning,
)
from services.gateway.text import FINISH_REASONS, TextDelta


class BlockKind(Enum):
    """Kinds of blocks."""

    TEXT = auto()
    REASONING = auto()
    CALL = auto()


@dataclass
class Block:
    """Adjacent parts of one kind, or one call of a tool.

    Attributes:
        index: position in the answer.
        name: name of the function of a call.
        call_id: id of a call.
        is_complete: whether the block has ended, and its end was not cut.
    """

    kind: BlockKind
    index: int
    name: str = ""
    call_id: str = ""
    is_complete: bool = False
    _pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or the arguments of the call as JSON text."""
        return "".join(self._pieces)

    def append(self, text: str) -> None:
        """Add the next text."""
        self._pieces.append(text)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """A block has further text."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block ends."""

    block: Block


Change: TypeAlias = Opened | Grown | Closed

_KINDS: dict[type[Part], BlockKind] = {
    Content: BlockKind.TEXT,
    Reasoning: BlockKind.REASONING,
}


class Answer:
    """The output of a request with one choice.

    Attributes:
        blocks: all blocks so far; only the last one may be open.
        output_tokens: number of output tokens.
        cached_tokens: number of prompt tokens whose KV was cached.
        finish: ``stop`` or ``length``; None while the output goes on.
        stop_string: stop string that ended the output, if any.
    """

    def __init__(self, messages: Messages | None) -> None:
        """Create an empty answer.

        Args:
            messages: conversion of the output to a message; None if all of it is content.
        """
        self.blocks: list[Block] = []
        self.output_tokens = self.cached_tokens = 0
        self.finish: str | None = None
        self.stop_string: str | None = None
        self._messages = messages
        self._parser = messages.new_parser() if messages else None
        self._open: Block | None = None
        # Tokens in the reasoning, and offsets of tokens that may belong to it.
        self._reasoning_tokens = 0
        self._undecided: list[int] = []

    @property
    def reasoning_tokens(self) -> int:
        """Number of output tokens in the reasoning block, with its tags."""
        return self._reasoning_tokens + len(self._undecided)

    @property
    def calls_tools(self) -> bool:
        """Whether the output ended by itself with complete calls, which the client should run."""
        calls = [block for block in self.blocks if block.kind is BlockKind.CALL]
        return self.finish == "stop" and bool(calls) and all(call.is_complete for call in calls)

    def push(self, deltas: Sequence[TextDelta]) -> Iterator[Change]:
        """Add output; yield how the blocks change. The caller must exhaust the iterator."""
        for delta in deltas:
            self.output_tokens += len(delta.tokens)
            self.cached_tokens += delta.cached_tokens
            reason = FINISH_REASONS.get(delta.finish)
            parts = self._parts(delta.text, is_last=reason is not None)
            self._count_reasoning(delta.offsets)
            yield from self._changes(parts)
            if reason is not None:
                self.finish, self.stop_string = reason, delta.stop_string
                is_cut = reason != "stop" or self._is_in_call
                yield from self._close(is_complete=not is_cut)

    @property
    def _is_in_call(self) -> bool:
        return self._open is not None and self._open.kind is BlockKind.CALL

    def _parts(self, text: str, *, is_last: bool) -> list[Part]:
        if self._parser is None:
            return [Content(text)] if text else []
        parts = self._parser.push(text)
        if is_last:
            parts.extend(self._parser.finish())
        return parts

    def _count_reasoning(self, offsets: Sequence[int]) -> None:
        if self._parser is None:
            return
        self._undecided.extend(offsets)
        end = self._parser.reasoning_end
        if end is not None:
            self._reasoning_tokens += sum(offset < end for offset in self._undecided)
            self._undecided.clear()

    def _changes(self, parts: Iterable[Part]) -> Iterator[Change]:
        for part in parts:
            match part:
                case CallStart(name):
                    assert self._messages is not None
                    yield from self._begin(BlockKind.CALL, name, self._messages.new_call_id())
                case CallArguments(text):
                    yield self._grow(text)
                case CallEnd():
                    yield from self._close(is_complete=True)
                case Content(text) | Reasoning(text):
                    kind = _KINDS[type(part)]
                    if self._open is None or self._open.kind is not kind:
                        yield from self._begin(kind)
                    yield self._grow(text)

    def _begin(self, kind: BlockKind, name: str = "", call_id: str = "") -> Iterator[Change]:
        yield from self._close(is_complete=True)
        self._open = Block(kind, len(self.blocks), name, call_id)
        self.blocks.append(self._open)
        yield Opened(self._open)

    def _grow(self, text: str) -> Change:
        assert self._open is not None
        self._open.append(text)
        return Grown(self._open, text)

    def _close(self, *, is_complete: bool) -> Iterator[Change]:
        block, self._open = self._open, None
        if block is not None:
            block.is_complete = is_complete
            yield Closed(block)
