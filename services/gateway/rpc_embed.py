"""The call ``Embed`` of the gRPC interface."""

from functools import partial

from headrace.v1 import inference_pb2
from services.common.encoder_placement import EncoderTask
from services.common.errors import InvalidRequest, TooLarge
from services.common.grpc_server import MAX_ITEM_BYTES
from services.common.messages import MAX_PRIORITY
from services.gateway.encoding.inputs import InputBuilder, Tokenization, tokenize_inputs
from services.gateway.encoding.request import FLOAT_BYTES
from services.gateway.encoding.scores import check_dimensions, rows_of, shortened
from services.gateway.gateway import Gateway
from services.gateway.requests import RequestContext

_INPUT_BYTES = 64
"""Memory that an input needs besides its content, bytes."""


async def embed(
    gateway: Gateway, message: inference_pb2.EmbedRequest, accepted: RequestContext
) -> inference_pb2.EmbedResponse:
    """Return the embeddings that a call asks for.

    Raises:
        ServiceError: if the request is invalid or cannot be completed.
    """
    size, limit = message.ByteSize(), gateway.settings.encoder_body_bytes
    if size > limit:
        raise TooLarge(f"the request is larger than {limit} bytes")
    encoder = gateway.require_encoder(message.model)
    count = _count(message, gateway.settings.max_inputs)
    has = message.HasField
    truncated = message.truncate_prompt_tokens if has("truncate_prompt_tokens") else None
    builder = InputBuilder.of(encoder, truncated, gateway.settings)
    if builder.facts.task is not EncoderTask.EMBED:
        raise gateway.has_no_embeddings()
    dimensions = message.dimensions if has("dimensions") else None
    if dimensions == 0:
        raise InvalidRequest("dimensions must be at least 1", param="dimensions")
    check_dimensions(dimensions, builder.facts)
    if count * (dimensions or builder.facts.dimension) * FLOAT_BYTES > MAX_ITEM_BYTES:
        raise TooLarge(f"the embeddings are larger than {MAX_ITEM_BYTES} bytes: send fewer texts")
    with gateway.buffers.open(accepted.owner.name) as grow, accepted.span.child("tokenize"):
        grow(size + _INPUT_BYTES * count)
        async with gateway.prompts.slot(accepted.owner, size):
            inputs = await tokenize_inputs(
                gateway.prompts,
                accepted.owner,
                size,
                partial(_inputs, message, builder),
                limit=limit,
            )
    asked = builder.request(accepted, inputs, priority=message.priority)
    rows = shortened(rows_of(await gateway.encode(asked)), dimensions)
    return inference_pb2.EmbedResponse(
        request_id=accepted.request_id,
        model=encoder.name,
        embeddings=[inference_pb2.Embedding(values=row) for row in rows],
        prompt_tokens=asked.tokens,
    )


def _count(message: inference_pb2.EmbedRequest, limit: int) -> int:
    """Return the number of inputs.

    Raises:
        InvalidRequest: there are none, too many, or both texts and tokens; or the priority is out
            of bounds.
    """
    if message.texts and message.tokens:
        raise InvalidRequest("set either texts or tokens, and not both", param="texts")
    count = len(message.texts) + len(message.tokens)
    if not 1 <= count <= limit:
        raise InvalidRequest(f"texts or tokens must have 1 to {limit} entries", param="texts")
    if not -MAX_PRIORITY <= message.priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
        )
    return count


def _inputs(message: inference_pb2.EmbedRequest, builder: InputBuilder) -> Tokenization:
    if message.tokens:
        return builder.ids([each.ids for each in message.tokens], "tokens")
    name = message.prompt_name if message.HasField("prompt_name") else None
    return builder.texts(message.texts, "texts", builder.prompt(name))
