"""Parses the output of one choice of a chat into reasoning, content and tool calls."""

from collections.abc import Iterable

from services.gateway.output.call_parser import CallParser
from services.gateway.output.parts import CallEnd, CallStart, Content, Part, Reasoning
from services.gateway.output.reasoning import ReasoningParser


class MessageParser:
    """Parses an output, of which the reasoning block comes first.

    Its state is a function of the text that it received. A retry of a request on another worker,
    which only continues the text, hence does not change the message.

    Args:
        reasoning: parser of the reasoning block; None if it is content.
        calls: parser of calls; None if they are content.
        include_reasoning: whether reasoning is returned, instead of dropped.
        parallel: whether more than the first call is returned.
        is_named: whether the client has named the function to call.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: CallParser | None,
        *,
        include_reasoning: bool = True,
        parallel: bool = True,
        is_named: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._include_reasoning = include_reasoning
        self._parallel = parallel
        self._is_named = is_named
        # Numbers of calls: all of them, and those returned without their end.
        self._started = self._incomplete = 0

    def push(self, text: str) -> list[Part]:
        """Return the new parts of the message."""
        if self._reasoning is None:
            return self._filtered(self._parse(text))
        return self._filtered(self._parsed(self._reasoning.push(text)))

    def finish(self) -> list[Part]:
        """Return the remaining parts at the end of the output."""
        parts = [] if self._reasoning is None else list(self._parsed(self._reasoning.finish()))
        if self._calls is not None:
            parts.extend(self._calls.finish())
        return self._filtered(parts)

    @property
    def reasoning_end(self) -> int | None:
        """See `ReasoningParser.end`; 0 if the output has no reasoning."""
        return 0 if self._reasoning is None else self._reasoning.end

    def finish_reason(self, reason: str) -> str:
        """Return the finish reason of the message, for that of the output.

        It is ``tool_calls`` if the output ended by itself and all of its calls are complete, but
        not if the client has named the function to call, as in OpenAI's API.
        """
        if self._is_named:
            return reason
        is_complete = self._started > 0 and not self._incomplete
        return "tool_calls" if reason == "stop" and is_complete else reason

    def _parsed(self, parts: Iterable[Part]) -> Iterable[Part]:
        for part in parts:
            if isinstance(part, Content):
                yield from self._parse(part.text)
            else:
                yield part

    def _parse(self, text: str) -> list[Part]:
        if self._calls is not None:
            return self._calls.push(text)
        return [Content(text)] if text else []

    def _filtered(self, parts: Iterable[Part]) -> list[Part]:
        kept = []
        for part in parts:
            if isinstance(part, Reasoning):
                is_kept = self._include_reasoning
            elif isinstance(part, Content):
                is_kept = True
            else:
                self._started += isinstance(part, CallStart)
                is_kept = self._parallel or self._started == 1
            if is_kept:
                kept.append(part)
                self._incomplete += isinstance(part, CallStart) - isinstance(part, CallEnd)
        return kept
