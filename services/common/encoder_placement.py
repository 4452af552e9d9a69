"""Messages of the router's HTTP API for encoder workers.

They are separate from those in `services.common.placement`: an encoder worker keeps no KV, serves
each request alone, and its load changes within milliseconds. Authentication and errors are those
described there.

================================  =========================  =====================================
``POST /v1/encoders/register``    `EncoderRegistration`      200 ``{}``; 409 `STALE_EPOCH`
``POST /v1/encoders/heartbeat``   `EncoderHeartbeat`         200 `HeartbeatReply`; 409
``POST /v1/encoders/deregister``  `Deregistration`           200 ``{}``
``POST /v1/encoders/place``       `EncodePlaceRequest`       200 `EncodePlacement`; 404, 408, 409,
                                                             429, 503
``POST /v1/encoders/release``     `Release`                  200 ``{}``, also if it is unknown
``GET /v1/encoders``              –                          200 `EncoderList`
================================  =========================  =====================================
"""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from services.common.messages import (
    MAX_ADMITTED,
    MAX_TOKENS,
    Address,
    Count,
    Epoch,
    Label,
    Message,
    PlacementId,
    QueueTokens,
    Sequences,
    WorkerId,
)
from services.common.placement import (
    PROTOCOL,
    QueuedRequest,
    WorkerAddress,
    WorkerState,
    same_protocol,
)

ENCODER = "encoder"
"""Name of the role of encoder workers, beside the values of `services.common.placement.Role`."""
MAX_DIMENSION = 1 << 16
"""Maximum numbers in the output for one input."""


class EncoderTask(StrEnum):
    """Output of an encoder: embeddings, or the logits of labels (cross encoders)."""

    EMBED = "embed"
    CLASSIFY = "classify"


class Activation(StrEnum):
    """Function from the logits of a cross encoder to its scores."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"


class EncoderModel(Message):
    """The encoder that a worker serves. The worker that loads it determines all values.

    Attributes:
        dimension: numbers in the output for one input: of an embedding, or number of labels.
        max_tokens: maximum tokens of an input, special tokens included.
        activation: function from the logits to the scores that clients get.
        tokenizer_hash: `TokenizerIdentity.hash`; empty if the model's files have no tokenizer.
    """

    name: Annotated[str, Field(min_length=1, max_length=256)]
    task: EncoderTask
    dimension: Annotated[int, Field(ge=1, le=MAX_DIMENSION)]
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)]
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)]
    activation: Activation = Activation.IDENTITY
    model_hash: Label
    tokenizer_hash: Label = ""


class EncoderRegistration(Message):
    """Registration of an encoder worker: once per epoch, and again when a router requests it.

    Attributes:
        protocol: `PROTOCOL` of the worker.
        address: host and port of the gRPC server.
        max_queue_tokens: maximum tokens that the worker accepts while it has others; a larger
            request is accepted only by an idle worker.
        batch_tokens: tokens of a full batch.
        heartbeat_s: time between two heartbeats, seconds.
    """

    protocol: Annotated[int, AfterValidator(same_protocol)] = PROTOCOL
    worker_id: WorkerId
    epoch: Epoch
    address: Address
    model: EncoderModel
    max_queue_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    batch_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    heartbeat_s: Annotated[float, Field(gt=0, le=60)]

    @property
    def worker(self) -> WorkerAddress:
        """Id, epoch and address of the worker."""
        return WorkerAddress(worker_id=self.worker_id, epoch=self.epoch, address=self.address)


class EncoderHeartbeat(Message):
    """Load of an encoder worker at one instant.

    Attributes:
        queue_tokens: tokens of all inputs that are accepted and not computed yet.
        running: number of inputs in the current batch.
        waiting: number of inputs that wait for a batch.
        tokens_per_s: tokens that it computed per second lately; 0 if that is unknown.
        admitted: ids of the placements that this load includes for the first time. A worker repeats
            an id until the router answers a heartbeat that contains it.
        ended: ids of admitted placements that have ended since, repeated likewise. The gateway may
            not have released them, because it has ended, or could not reach this router.
        reason: why the worker is not ready.
    """

    worker_id: WorkerId
    epoch: Epoch
    state: WorkerState
    queue_tokens: QueueTokens
    running: Sequences = 0
    waiting: Sequences = 0
    tokens_per_s: Annotated[float, Field(ge=0)] = 0.0
    admitted: Annotated[list[PlacementId], Field(max_length=MAX_ADMITTED)] = Field(
        default_factory=list
    )
    ended: Annotated[list[PlacementId], Field(max_length=MAX_ADMITTED)] = Field(
        default_factory=list
    )
    reason: Annotated[str, Field(max_length=512)] | None = None


class EncodePlaceRequest(QueuedRequest):
    """Inputs to place on one encoder worker.

    Attributes:
        model_hash: version of the model for which the inputs were made. Workers of another version
            get them only if no worker of this one is ready.
        tokens: number of tokens of all inputs.
    """

    model: Annotated[str, Field(min_length=1, max_length=256)]
    model_hash: Label
    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class EncodePlacement(Message):
    """Worker chosen for inputs, with its model as registered."""

    placement_id: PlacementId
    worker: WorkerAddress
    model: EncoderModel


class EncoderView(Message):
    """State of an encoder worker as the router sees it.

    Attributes:
        state: the reported state, or ``suspect`` or ``probation``.
        reason: why the worker gets no requests; None otherwise.
        queue_tokens: tokens accepted or placed, and not computed yet.
        tokens_per_s, running, waiting: see `EncoderHeartbeat`.
        silent_s: time since the last heartbeat, seconds.
    """

    worker_id: WorkerId
    epoch: Epoch
    address: Address
    model: EncoderModel
    state: str
    reason: str | None
    queue_tokens: Count
    tokens_per_s: float = 0.0
    running: Count
    waiting: Count
    silent_s: float


class EncoderReadiness(Message):
    """Whether requests for an encoder can be placed now.

    Attributes:
        reason: why not; None if ``ready``.
        infos: the encoder as its ready workers registered it, without repetitions.
        batch_tokens: tokens of a full batch on the ready workers, the smallest; 0 if none is ready.
    """

    model: Label
    ready: bool
    reason: str | None = None
    infos: list[EncoderModel] = Field(default_factory=list)
    batch_tokens: Count = 0


class EncoderList(Message):
    """All registered encoder workers, and the encoders that they serve.

    Attributes:
        waiting: number of placement requests in the router's queue.
    """

    workers: list[EncoderView]
    models: list[EncoderReadiness]
    waiting: Count = 0
