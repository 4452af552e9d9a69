"""Interface of a format of tool calls. Each family of models has one."""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

from runtime.grammar.schema import prepared_schema
from runtime.grammar.spec import GrammarKind, GrammarSpec
from services.gateway.output.call_grammar import CallSink
from services.gateway.output.lark import Marks, quoted
from services.tokenizer.chat_template import ChatTemplate

Messages = Sequence[Mapping[str, Any]]
OPENING = "opening"
"""Rule for the marker before the first call, and for what may precede it."""
CALLS = "calls"
"""Rule for calls, of `ToolFormat.rules`."""


class ToolFormat(ABC):
    """A format in which models write tool calls. Instances have no state.

    Attributes:
        name: name in the setting ``tool_parser``.
        marker: text with which calls begin.
        other_marker: text with which they begin if ``marker`` is missing; `block` reads it.
        marks: texts of the format that a tokenizer may have as special tokens.
        bare: whether an output may also begin with a call without ``marker``.
        describes_tools: whether `prepare` describes the tools, instead of the chat template.
    """

    name: ClassVar[str]
    marker: ClassVar[str]
    other_marker: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]]
    bare: ClassVar[bool] = False
    describes_tools: ClassVar[bool] = False

    @abstractmethod
    def fits(self, template: ChatTemplate) -> bool:
        """Return whether models with this chat template write calls in this format."""

    @abstractmethod
    def block(self, sink: CallSink) -> Generator[None, str, object]:
        """Read calls after ``marker``, or from ``other_marker`` on."""

    @abstractmethod
    def rules(
        self, functions: Sequence[tuple[str, str]], marks: Marks, *, parallel: bool
    ) -> list[str]:
        """Return rules in Lark syntax: `CALLS`, which begins with `OPENING`, and those it uses.

        Each text of these rules is a call, or several, for `block`.

        Args:
            functions: names of functions, each with the rule of its arguments.
            marks: writes the marks.
            parallel: whether several calls are allowed.
        """

    def argument_rules(self, rule: str, schema: Mapping[str, Any]) -> list[str]:
        """Return the rule of the arguments of a function in Lark syntax, and those it uses.

        Args:
            rule: its name, which begins those of the other rules.
            schema: schema of the arguments.

        Raises:
            InvalidGrammar: the format cannot follow the schema.
        """
        return [f"{rule}: %json {json.dumps(prepared_schema(schema))}"]

    def constraint(self, schema: Mapping[str, Any]) -> GrammarSpec:
        """Return a constraint that compiles if `argument_rules` do.

        Raises:
            InvalidGrammar: see `argument_rules`.
        """
        return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))

    def new_id(self) -> str:
        """Return an id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def prepare(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Messages, Sequence[Mapping[str, Any]]]:
        """Return messages and tools as the chat template takes them."""
        return messages, tools


def object_rule(functions: Sequence[tuple[str, str]], arguments_key: str) -> str:
    """Return the rule ``call`` for JSON objects with the name and the arguments of a function."""
    objects = []
    for name, arguments in functions:
        start = f'{{"name": "{name}", "{arguments_key}": '
        objects.append(f"{quoted(start)} {arguments} {quoted('}')}")
    return f"call: {' | '.join(objects)}"
