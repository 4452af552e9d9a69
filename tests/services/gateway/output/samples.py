"""Outputs of models with tool calls and reasoning, and a parser for each format."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.gateway.output.call_parser import CallParser
from services.gateway.output.formats import REASONING_FORMATS, TOOL_FORMATS
from services.gateway.output.message_parser import MessageParser
from services.gateway.output.parts import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Part,
    Reasoning,
)
from services.gateway.output.reasoning import ReasoningParser

PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "string"},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "on": {"type": "boolean"},
        "items": {"type": "array"},
        "map": {"$ref": "#/$defs/map"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "level": {"enum": ["low", "high", None]},
        "any": {},
    },
    "$defs": {"map": {"type": "object"}},
}
TOOLS = {"f": PARAMETERS, "get_weather": {}}


@dataclass
class Parsed:
    """A message: its texts, and name, arguments and completeness of each call."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, bool]] = field(default_factory=list)
    finish: str = ""


def join(parts: Iterable[Part]) -> Parsed:
    """Return the message that consists of these parts."""
    message = Parsed()
    for part in parts:
        match part:
            case Content(text):
                message.content += text
            case Reasoning(text):
                message.reasoning += text
            case CallStart(name):
                message.calls.append((name, "", False))
            case CallArguments(text):
                name, arguments, _ = message.calls[-1]
                message.calls[-1] = (name, arguments + text, False)
            case CallEnd():
                name, arguments, _ = message.calls[-1]
                message.calls[-1] = (name, arguments, True)
    return message


def parser(
    tools: str | None = None,
    reasoning: str | None = None,
    *,
    is_open: bool = False,
    parallel: bool = True,
    include_reasoning: bool = True,
) -> MessageParser:
    """Return a parser for the named formats."""
    return MessageParser(
        ReasoningParser(REASONING_FORMATS[reasoning], is_open=is_open) if reasoning else None,
        CallParser(TOOL_FORMATS[tools], TOOLS) if tools else None,
        parallel=parallel,
        include_reasoning=include_reasoning,
    )


def parse(parser: MessageParser, pieces: Sequence[str], finish: str = "stop") -> Parsed:
    """Return the message of an output that arrives in pieces."""
    parts = [part for piece in pieces for part in parser.push(piece)]
    message = join([*parts, *parser.finish()])
    message.finish = parser.finish_reason(finish)
    return message


def call(name: str = "f", arguments: str = "{}", end: bool = True) -> tuple[str, str, bool]:
    """Return a call as in `Parsed.calls`."""
    return name, arguments, end
