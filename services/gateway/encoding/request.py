"""Inputs of a client's request for an encoder, and their cut into parts.

A part is placed, sent and repeated on its own. A long list is therefore spread over several
workers, and the loss of one of them costs only its parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from services.common.encoder_placement import EncoderModel
from services.common.grpc_server import MAX_ITEM_BYTES
from services.common.token_ids import TOKEN_BYTES
from services.gateway.requests import RequestContext
from services.tokenizer.encoder import EncoderTokens

FLOAT_BYTES = 4
_INPUT_BYTES = 32
"""Bytes of an input, or of an output, in a message beside its content, at most."""


@dataclass(frozen=True)
class EncodingRequest:
    """Inputs to encode, validated.

    Attributes:
        encoder: the encoder as its workers registered it.
        part_tokens: maximum tokens of a part.
        priority: priority among the requests of the tenant; lower is earlier.
        operation: name of the operation, for traces.
    """

    context: RequestContext
    encoder: EncoderModel
    inputs: Sequence[EncoderTokens]
    part_tokens: int
    priority: int = 0
    operation: str = "embeddings"

    @property
    def model(self) -> str:
        """Name of the encoder."""
        return self.encoder.name

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of all inputs."""
        return sum(len(each.tokens) for each in self.inputs)

    @property
    def place_priority(self) -> int:
        """Priority for routers, which place larger values first; the API key limits it."""
        tenant = self.context.tenant
        return -(self.priority if tenant is None else max(self.priority, tenant.first_priority))


@dataclass(frozen=True)
class Part:
    """Consecutive inputs of a request, from index ``first``, with ``tokens`` tokens."""

    first: int
    inputs: Sequence[EncoderTokens]
    tokens: int


def cut(
    inputs: Sequence[EncoderTokens],
    dimension: int,
    *,
    max_tokens: int,
    max_bytes: int = MAX_ITEM_BYTES,
) -> Iterator[Part]:
    """Yield the parts of a request, in order.

    A part has at least one input, and otherwise at most ``max_tokens`` tokens. Neither its message
    nor the reply, with ``dimension`` numbers for each input, exceeds ``max_bytes``.
    """
    first = tokens = sent = received = 0
    of_output = dimension * FLOAT_BYTES + _INPUT_BYTES
    for index, each in enumerate(inputs):
        length = len(each.tokens)
        size = length * TOKEN_BYTES + len(each.types) + _INPUT_BYTES
        is_full = (
            tokens + length > max_tokens
            or sent + size > max_bytes
            or received + of_output > max_bytes
        )
        if is_full and index > first:
            yield Part(first, inputs[first:index], tokens)
            first, tokens, sent, received = index, 0, 0, 0
        tokens += length
        sent += size
        received += of_output
    if inputs:
        yield Part(first, inputs[first:], tokens)
