"""Conversion of messages to the runtime's types, by field name."""

import dataclasses
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from headrace.v1.sampling_pb2 import BadWord, Sampling
from runtime.core.request import SamplingParams
from services.worker.wire import request_from_message
from tests.services.workers import message_of

FIELDS = Sampling.DESCRIPTOR.fields
NOT_IN_THE_MESSAGE = {"suppressed"}
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
