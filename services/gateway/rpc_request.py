"""Conversion of ``GenerateRequest`` of the gRPC interface to the options of a request."""

from collections.abc import Iterator
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import ValidationError

from headrace.v1 import inference_pb2
from services.common.constraints import constraint_of
from services.common.errors import InvalidRequest
from services.gateway.chats import ChatOptions, adds_generation_prompt
from services.gateway.constraints import Constraint
from services.gateway.request_errors import UnsupportedField, invalid_field
from services.gateway.requests import GenerationOptions

_STRUCTURED: Final = "structured_outputs"


def check_known(message: Message) -> None:
    """Refuse fields that the schema of this server lacks: protobuf would ignore them.

    Raises:
        UnsupportedField: there is one. ``param`` is its number, after the name of its message.
    """
    for path in _unknown_fields(message, ""):
        raise UnsupportedField(f"field number {path} is not known to this server", param=path)


def generation_options(message: inference_pb2.GenerateRequest) -> GenerationOptions:
    """Return the options with the fields that are set in the message. Names are equal in both.

    Raises:
        InvalidRequest: if a field is invalid; ``param`` names it.
    """
    given = {
        field.name: value
        for field, value in message.ListFields()
        if field.name in GenerationOptions.model_fields
    }
    try:
        options = GenerationOptions.model_validate(given)
    except ValidationError as error:
        raise invalid_field(error.errors(include_url=False, include_input=False)[0]) from None
    if not message.HasField(_STRUCTURED):
        return options
    spec = constraint_of(message.structured_outputs)
    if spec is None:
        raise InvalidRequest("set one constraint in structured_outputs", param=_STRUCTURED)
    field = f"{_STRUCTURED}.{message.structured_outputs.WhichOneof('constraint')}"
    return options.model_copy(update={"constraint": Constraint(spec, field)})


def adds_special_tokens(message: inference_pb2.GenerateRequest) -> bool:
    """Return whether special tokens, such as BOS, are added to a text.

    Raises:
        InvalidRequest: if the field is set, but the prompt is not a text.
    """
    if not message.HasField("add_special_tokens"):
        return True
    if message.WhichOneof("prompt") != "text":
        raise InvalidRequest("add_special_tokens requires text", param="add_special_tokens")
    return message.add_special_tokens


def chat_options(chat: inference_pb2.Chat) -> ChatOptions:
    """Return the options of a conversation.

    Raises:
        InvalidRequest: if they contradict each other.
    """
    add = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    return ChatOptions(
        add_generation_prompt=adds_generation_prompt(add, continues=chat.continue_final_message),
        continue_final_message=chat.continue_final_message,
    )


def template_input(message: inference_pb2.ChatMessage) -> dict[str, str]:
    """Return a message as chat templates take it."""
    return {"role": message.role, "content": message.content}


def _unknown_fields(message: Message, path: str) -> Iterator[str]:
    """Yield the paths of the fields that the schema of a message lacks."""
    unknown = UnknownFieldSet(message)
    for at in range(len(unknown)):
        yield f"{path}{unknown[at].field_number}"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in [value] if isinstance(value, Message) else value:
            yield from _unknown_fields(part, f"{path}{field.name}.")
