"""Grammars of messages: reasoning, then tool calls, constrained content or free content."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.grammar.spec import ANSWER, LARK, GrammarKind, GrammarSpec
from services.common.errors import InvalidRequest
from services.gateway.output.lark import (
    NOT_EMPTY,
    SPACE,
    Marks,
    not_beginning_with,
    quoted,
    without,
)
from services.gateway.output.reasoning import ReasoningFormat
from services.gateway.output.tool_format import CALLS, OPENING, ToolFormat

OBJECT: Mapping[str, Any] = {"type": "object"}
"""Schema of any object."""
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}


def arguments_schema(parameters: Mapping[str, Any] | None, field: str) -> Mapping[str, Any]:
    """Return the schema of the arguments of a function.

    Args:
        parameters: schema of the client; None for a function without parameters.
        field: the client's field with it.

    Raises:
        InvalidRequest: it is not a schema of objects.
    """
    if parameters is None:
        return _NO_ARGUMENTS
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{field}.type must be 'object'", param=f"{field}.type")
    return {**parameters, "type": "object"}


@dataclass(frozen=True)
class CallableTool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of the arguments, whose type is object.
        is_strict: whether all of the schema must be followed.
        field: the client's field with the schema.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    field: str = ""


@dataclass(frozen=True)
class CallGrammar:
    """Tool calls in a message.

    Attributes:
        required: whether the message must have calls. Otherwise it may have content instead, or
            before them.
        parallel: whether it may have several.
    """

    format: ToolFormat
    tools: Sequence[CallableTool]
    required: bool
    parallel: bool


@dataclass(frozen=True)
class MessageGrammar:
    """The form of a message: reasoning, then calls or content.

    Attributes:
        reasoning: format of the reasoning block before the rest; None if there is none.
        is_reasoning: whether the output begins in a block. Otherwise it may begin with one.
        calls: calls that the message may have; None if it has none.
        answer: constraint on the content of a message without calls; None for any content.
        field: the client's field that requires the grammar.
    """

    reasoning: ReasoningFormat | None
    is_reasoning: bool
    calls: CallGrammar | None
    answer: GrammarSpec | None
    field: str = ""

    @property
    def gap(self) -> str:
        """White space between the reasoning block and constrained content or required calls."""
        is_free = self.answer is None and not (self.calls and self.calls.required)
        return self.reasoning.gap if self.reasoning and not is_free else ""

    def spec(self, marks: Marks) -> GrammarSpec:
        """Return the constraint on the output.

        Raises:
            InvalidGrammar: see `ToolFormat.argument_rules`.
        """
        if self.calls is None and self.answer is not None and self.reasoning is None:
            return self.answer
        parts, rules = self._parts(marks)
        body = f"({' | '.join(parts)})"
        if self.reasoning is not None:
            thought, thoughts = self._thought(self.reasoning, marks)
            body, rules = f"{thought} {body}", [*thoughts, *rules]
        text = "\n".join([f"start: {body}", *rules])
        if self.answer is None or ANSWER not in parts:
            return GrammarSpec(GrammarKind.GRAMMAR, f"{LARK}\n{text}")
        return GrammarSpec(self.answer.kind, self.answer.text, text)

    def _thought(self, format: ReasoningFormat, marks: Marks) -> tuple[str, list[str]]:
        """Return an expression for a reasoning block, and its rules."""
        gap = f" {quoted(self.gap)}" if self.gap else ""
        rules = marks.up_to("reasoning", format.end)
        if self.is_reasoning:
            return f"reasoning{gap}", rules
        return f"({marks.exactly(format.start)} reasoning{gap})?", rules

    def _parts(self, marks: Marks) -> tuple[list[str], list[str]]:
        """Return the rules, one of which the message after the reasoning has, and their rules."""
        if self.calls is None:
            return [ANSWER], []
        names = [(tool.name, f"arguments_{n}") for n, tool in enumerate(self.calls.tools)]
        format = self.calls.format
        rules = [
            line
            for (_, rule), tool in zip(names, self.calls.tools, strict=True)
            for line in format.argument_rules(rule, tool.parameters)
        ]
        rules += format.rules(names, marks, parallel=self.calls.parallel)
        mark = marks.exactly(format.marker)
        if self.calls.required:
            return [CALLS], [f"{OPENING}: {mark}{'?' if format.bare else ''}", *rules]
        if self.answer is not None:
            return [CALLS, ANSWER], [f"{OPENING}: {mark}", *rules]
        return [CALLS, "free"], [*self._free(format, marks), *rules]

    def _free(self, format: ToolFormat, marks: Marks) -> list[str]:
        """Return the rules for content without calls, and for what precedes a call."""
        conditions = [not_beginning_with("{")] if format.bare else []
        if format.other_marker:
            conditions.append(without(format.other_marker))
        if self.reasoning is not None and not self.is_reasoning:
            conditions.append(not_beginning_with(self.reasoning.start))
        text = " & ".join([NOT_EMPTY, without(format.marker), *conditions])
        rules = ["free: FREE?", f"FREE: {text}", *marks.up_to("marked", format.marker, *conditions)]
        if format.bare:
            return [f"{OPENING}: (marked | BLANK)?", f"BLANK: /{SPACE}+/", *rules]
        return [f"{OPENING}: marked", *rules]
