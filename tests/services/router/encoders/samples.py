"""Sample encoder workers and requests."""

from random import Random
from typing import Any

from services.common.encoder_placement import (
    EncodePlacement,
    EncodePlaceRequest,
    EncoderHeartbeat,
    EncoderModel,
    EncoderRegistration,
    EncoderTask,
)
from services.common.placement import WorkerState
from services.common.router_errors import ErrorCode
from services.router.admission import Admission, AdmissionLimits
from services.router.choice import PolicyName
from services.router.encoders.dispatcher import EncoderDispatcher, PendingEncode
from services.router.encoders.fleet import EncoderFleet
from services.router.errors import Refusal
from services.router.fleet import FleetLimits

NOW = 100.0
BATCH = 100


def encoder(name: str = "minilm", **values: Any) -> EncoderModel:
    known = {"task": EncoderTask.EMBED, "dimension": 8, "max_tokens": 64, "vocab_size": 1000}
    return EncoderModel(**{"name": name, "model_hash": "h", **known, **values})


def registration(
    worker_id: str,
    *,
    epoch: str = "e1",
    model: str = "minilm",
    max_queue_tokens: int = 1000,
    batch_tokens: int = BATCH,
    **values: Any,
) -> EncoderRegistration:
    """Return a registration; ``values`` are those of its model."""
    return EncoderRegistration(
        worker_id=worker_id,
        epoch=epoch,
        address="127.0.0.1:5000",
        model=encoder(model, **values),
        max_queue_tokens=max_queue_tokens,
        batch_tokens=batch_tokens,
        heartbeat_s=0.25,
    )


def beat(worker_id: str, *, epoch: str = "e1", **values: Any) -> EncoderHeartbeat:
    known = {"state": WorkerState.READY, "queue_tokens": 0}
    return EncoderHeartbeat(worker_id=worker_id, epoch=epoch, **{**known, **values})


def request(placement_id: str, tokens: int = 10, **values: Any) -> EncodePlaceRequest:
    known = {"request_id": "r", "model": "minilm", "model_hash": "h", "wait_s": 60.0}
    return EncodePlaceRequest(placement_id=placement_id, tokens=tokens, **{**known, **values})


def dispatcher(*workers: str, **values: Any) -> EncoderDispatcher:
    known = {"max_waiting": 64, "max_wait_s": 60.0, "backlog_s": 0.25}
    made = EncoderDispatcher(
        EncoderFleet(FleetLimits()),
        PolicyName.SHORTEST_QUEUE,
        Random(0),
        Admission(AdmissionLimits()),
        **{**known, **values},
    )
    for name in workers:
        made.register(registration(name), NOW)
        made.heartbeat(beat(name), NOW)
    return made


def worker_of(call: PendingEncode) -> str | None:
    """Return the id of the worker of a placed call; None while it waits."""
    if isinstance(call.answer, Refusal):
        raise call.answer
    return call.answer.worker.worker_id if isinstance(call.answer, EncodePlacement) else None


def code_of(call: PendingEncode) -> ErrorCode:
    assert isinstance(call.answer, Refusal)
    return call.answer.code
