"""Conversion of messages to the runtime's types, by field name."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from headrace.v1.sampling_pb2 import BadWord, Choices, Sampling, StructuredOutputs
from runtime.core.request import SamplingParams
from runtime.errors import GrammarFailed
from runtime.grammar.spec import GrammarKind, GrammarSpec
from services.common.constraints import constraint_message
from services.common.error_codes import error_reason
from services.worker.wire import constraint_from_message, fault_to_code, request_from_message
from tests.services.workers import message_of

FIELDS = Sampling.DESCRIPTOR.fields
NOT_IN_THE_MESSAGE = {"suppressed", "constrained"}
"""Parameters that the worker derives from other fields of the request."""
CONVERTED: dict[str, tuple[Any, Any]] = {
    "allowed_token_ids": ([4, 5], {4, 5}),
    "bad_words": ([BadWord(tokens=[6, 7]), BadWord(tokens=[8])], ((6, 7), (8,))),
}
"""Values in the message, and the equivalent values of the parameter, where these differ."""


def sampling_of(sampling: Sampling) -> SamplingParams:
    message = message_of(5)
    message.sampling.CopyFrom(sampling)
    return request_from_message("r", message).sampling


def value_for(field: FieldDescriptor) -> Any:
    """Return a value that is the default of no parameter and equals that of no other field."""
    if field.name in CONVERTED:
        return CONVERTED[field.name][0]
    if field.message_type:  # a map
        return {field.number: 0.5}
    return field.number + (0.5 if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE else 0)


def test_sampling_message_and_parameters_have_the_same_fields() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {field.name for field in FIELDS} | NOT_IN_THE_MESSAGE


def test_every_sampling_field_reaches_the_parameter_of_its_name() -> None:
    sent = {field.name: value_for(field) for field in FIELDS}
    arrived = dataclasses.asdict(sampling_of(Sampling(**sent)))
    expected = sent | {name: parameter for name, (_, parameter) in CONVERTED.items()}
    assert {name: arrived[name] for name in sent} == expected
    assert type(arrived["logit_bias"]) is dict  # the message is not kept alive


def test_absent_logprobs_differ_from_zero() -> None:
    assert sampling_of(Sampling()).logprobs is None
    assert sampling_of(Sampling(logprobs=0)).logprobs == 0


@pytest.mark.parametrize(("min_tokens", "suppressed"), [(0, set()), (2, {3, 9})])
def test_stop_tokens_are_suppressed_only_with_min_tokens(
    min_tokens: int, suppressed: set[int]
) -> None:
    message = message_of(5)
    message.sampling.min_tokens = min_tokens
    message.stop_token_ids[:] = [3, 9]
    assert request_from_message("r", message).sampling.suppressed == suppressed


@pytest.mark.parametrize(
    ("sent", "kind", "text"),
    [
        (StructuredOutputs(json="{}"), GrammarKind.JSON_SCHEMA, "{}"),
        (StructuredOutputs(regex="a"), GrammarKind.REGEX, "a"),
        (StructuredOutputs(choice=Choices(texts=["ä", '"'])), GrammarKind.CHOICE, '["ä", "\\""]'),
        (StructuredOutputs(grammar="b"), GrammarKind.GRAMMAR, "b"),
        (StructuredOutputs(json_object=True), GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
    ],
)
def test_constraint_of_a_message(sent: StructuredOutputs, kind: GrammarKind, text: str) -> None:
    message = message_of(5)
    message.structured_outputs.CopyFrom(sent)
    assert request_from_message("r", message).sampling.constrained
    spec = constraint_from_message(message)
    assert spec == GrammarSpec(kind, text)
    message.structured_outputs.CopyFrom(constraint_message(spec))
    assert constraint_from_message(message) == spec
    message.output_frame = "start: answer"
    assert constraint_from_message(message) == replace(spec, frame="start: answer")


def test_message_without_a_constraint() -> None:
    message = message_of(5)
    assert not request_from_message("r", message).sampling.constrained
    message.structured_outputs.SetInParent()
    assert constraint_from_message(message) is None
    assert not request_from_message("r", message).sampling.constrained


def test_failure_of_a_grammar_is_not_retried() -> None:
    assert error_reason(fault_to_code(GrammarFailed("x"))) == "invalid"
