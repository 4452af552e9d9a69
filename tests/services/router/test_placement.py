"""Validation of the messages of the router's API."""

import pytest
from pydantic import ValidationError

from services.common.errors import SettingsError
from services.common.messages import MAX_TOKENS
from services.common.placement import Heartbeat, Placement, Registration, Role, WorkerAddress
from services.router.fleet import Fleet, FleetLimits
from services.router.settings import RouterSettings
from tests.services.router.samples import COMPATIBLE, beat, registration
from tests.services.router.test_unmatched import OTHER


def test_mismatches_name_every_field_that_differs() -> None:
    assert COMPATIBLE.mismatches(COMPATIBLE.model_copy()) == []
    for name in type(COMPATIBLE).model_fields:
        other = COMPATIBLE.model_copy(update={name: OTHER[name]})
        assert COMPATIBLE.mismatches(other) == other.mismatches(COMPATIBLE) == [name]


@pytest.mark.parametrize("name", ["context_length", "eos_token_ids", "model_hash"])
def test_registration_that_contradicts_itself_is_refused(name: str) -> None:
    body = registration("w", Role.DECODE).model_dump()
    body["model"][name] = OTHER[name]
    with pytest.raises(ValidationError, match=f"{name} of the model is not that of"):
        Registration.model_validate(body)


@pytest.mark.parametrize(
    ("address", "good"),
    [
        ("127.0.0.1:1", True),
        ("worker-0.workers.svc:50051", True),
        ("[::1]:65535", True),
        ("127.0.0.1", False),
        ("host:", False),
        ("unix:/tmp/socket", False),
        ("a b:1", False),
        ("host:123456", False),
    ],
)
def test_address_format(address: str, good: bool) -> None:
    body = f'{{"worker_id": "w", "epoch": "e", "address": "{address}"}}'
    if good:
        assert WorkerAddress.model_validate_json(body).address == address
    else:
        with pytest.raises(ValidationError):
            WorkerAddress.model_validate_json(body)


def test_messages_survive_serialization() -> None:
    worker = WorkerAddress(worker_id="w", epoch="e", address="h:1")
    model = registration("w", Role.DECODE).model
    for message in (
        Placement(placement_id="a", prefill=None, decode=worker, max_tokens=1, model=model),
        beat("d0", admitted=["a", "b"], reason="why"),
    ):
        assert type(message).model_validate_json(message.model_dump_json()) == message


def test_contradicting_settings_are_an_error() -> None:
    with pytest.raises(SettingsError, match="longer than suspect_after_s"):
        RouterSettings.load(["--suspect-after-s", "20"], program="headrace router")


def test_queue_may_have_more_tokens_than_one_request() -> None:
    """A worker that cannot report its load becomes suspect, and gets no requests."""
    tokens = MAX_TOKENS + 1
    load = Heartbeat.model_validate_json(
        beat("d0", queue_tokens=tokens, pending_prompt_tokens=tokens).model_dump_json()
    )
    worker = registration("d0", Role.DECODE, overflow_tokens=tokens)
    fleet = Fleet(FleetLimits())
    fleet.register(worker, 0.0)
    assert fleet.heartbeat(load, 0.0)
    assert fleet.views(0.0)[0].queue_tokens == tokens
    (found,) = fleet.snapshots(0.0)
    assert (found.queue_tokens, found.overflow_tokens) == (tokens, tokens)
