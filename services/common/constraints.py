"""Conversion of constraints on output between messages and `runtime.grammar`."""

import json

from headrace.v1 import sampling_pb2 as pb
from runtime.grammar.spec import GrammarKind, GrammarSpec


def constraint_of(message: pb.StructuredOutputs) -> GrammarSpec | None:
    """Return the constraint of a message, or None if it has none."""
    match message.WhichOneof("constraint"):
        case "json":
            return GrammarSpec(GrammarKind.JSON_SCHEMA, message.json)
        case "regex":
            return GrammarSpec(GrammarKind.REGEX, message.regex)
        case "choice":
            return choice_constraint(list(message.choice.texts))
        case "grammar":
            return GrammarSpec(GrammarKind.GRAMMAR, message.grammar)
    return GrammarSpec.json_object() if message.json_object else None


def choice_constraint(texts: list[str]) -> GrammarSpec:
    """Return the constraint to one of some texts."""
    return GrammarSpec(GrammarKind.CHOICE, json.dumps(texts, ensure_ascii=False))


def constraint_message(spec: GrammarSpec) -> pb.StructuredOutputs:
    """Return the message of a constraint."""
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return pb.StructuredOutputs(json=spec.text)
        case GrammarKind.REGEX:
            return pb.StructuredOutputs(regex=spec.text)
        case GrammarKind.CHOICE:
            return pb.StructuredOutputs(choice=pb.Choices(texts=json.loads(spec.text)))
        case GrammarKind.GRAMMAR:
            return pb.StructuredOutputs(grammar=spec.text)
