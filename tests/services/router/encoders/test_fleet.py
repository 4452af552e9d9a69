"""Encoder workers of a router: load, epochs, health and the end of placements."""

from typing import Any

import pytest

from services.common.placement import Outcome, Release, WorkerState
from services.common.router_errors import ErrorCode
from services.router.encoders.fleet import EncoderFleet
from services.router.errors import Refusal
from services.router.fleet import FleetLimits
from tests.services.router.encoders.samples import NOW, beat, registration, request


@pytest.fixture
def fleet() -> EncoderFleet:
    made = EncoderFleet(FleetLimits(placement_ttl_s=30, probation_s=0.5))
    made.register(registration("a"), NOW)
    made.heartbeat(beat("a"), NOW)
    return made


def place(fleet: EncoderFleet, placement_id: str, tokens: int = 10, now: float = NOW) -> None:
    asked = request(placement_id, tokens)
    (worker,) = fleet.candidates(asked, now)
    fleet.place(worker, asked, now)


def queue(fleet: EncoderFleet) -> int:
    return fleet.candidates(request("other"), NOW)[0].queue_tokens


def ended(placement_id: str, outcome: Outcome = Outcome.OK, blame: str | None = None) -> Release:
    return Release(placement_id=placement_id, outcome=outcome, blame=blame)


def test_placement_counts_until_its_release(fleet: EncoderFleet) -> None:
    place(fleet, "p1", 10)
    place(fleet, "p2", 5)
    assert queue(fleet) == 15
    assert fleet.release(ended("p1"), NOW + 1) == 1.0
    assert queue(fleet) == 5
    assert fleet.release(ended("p1"), NOW + 1) is None
    assert queue(fleet) == 5


def test_admitted_placement_is_not_counted_twice(fleet: EncoderFleet) -> None:
    place(fleet, "p1", 10)
    fleet.heartbeat(beat("a", queue_tokens=10, admitted=["p1"]), NOW)
    assert queue(fleet) == 10
    fleet.heartbeat(beat("a", queue_tokens=4), NOW)  # a part is computed
    assert queue(fleet) == 10
    fleet.release(ended("p1"), NOW)
    assert queue(fleet) == 0


def test_placement_that_the_worker_reports_as_ended_counts_no_longer(fleet: EncoderFleet) -> None:
    """Its gateway may have been killed, so that it is never released."""
    place(fleet, "p1", 10)
    place(fleet, "p2", 5)
    fleet.heartbeat(beat("a", admitted=["p1"], ended=["p1", "unknown"]), NOW)
    assert queue(fleet) == 5
    fleet.heartbeat(beat("a", queue_tokens=5, admitted=["p2"]), NOW)
    assert queue(fleet) == 5
    assert fleet.release(ended("p1", Outcome.FAILED, "a"), NOW + 1) == 1.0
    assert queue(fleet) == 5
    assert fleet.views(NOW + 1)[0].state == "probation"


def test_workers_of_the_requested_version_are_preferred(fleet: EncoderFleet) -> None:
    fleet.register(registration("b", model_hash="new"), NOW)
    fleet.heartbeat(beat("b"), NOW)

    def candidates(version: str, **values: Any) -> list[str]:
        asked = request("p", model_hash=version, **values)
        return [each.worker_id for each in fleet.candidates(asked, NOW)]

    assert candidates("h") == ["a"]
    assert candidates("new") == ["b"]
    assert candidates("gone") == ["a", "b"]
    assert candidates("new", exclude=["b"]) == ["a", "b"]
    fleet.heartbeat(beat("b", state=WorkerState.DRAINING), NOW)
    assert candidates("new") == ["a", "b"]


def test_readiness_has_the_smallest_batch_of_ready_workers(fleet: EncoderFleet) -> None:
    for name, batch_tokens in (("b", 70), ("c", 20)):
        fleet.register(registration(name, batch_tokens=batch_tokens), NOW)
    fleet.heartbeat(beat("b"), NOW)
    (found,) = fleet.readiness(NOW)
    assert found.ready
    assert found.batch_tokens == 70
    assert len(found.infos) == 1


def test_tokens_of_other_routers_are_added(fleet: EncoderFleet) -> None:
    place(fleet, "p1", 10)
    fleet.heartbeat(beat("a", queue_tokens=25), NOW)  # p1 has not arrived yet
    assert queue(fleet) == 35
    fleet.heartbeat(beat("a", queue_tokens=35, admitted=["p1", "elsewhere"]), NOW)
    assert queue(fleet) == 35
    fleet.release(ended("p1"), NOW)
    assert queue(fleet) == 25
    fleet.heartbeat(beat("a"), NOW)
    assert fleet.idle


def test_placement_without_release_expires(fleet: EncoderFleet) -> None:
    place(fleet, "p1", 10)
    fleet.heartbeat(beat("a"), NOW + 31)
    assert fleet.expire(NOW + 31) == []
    assert queue(fleet) == 0


def test_worker_without_heartbeats_is_suspect_then_gone(fleet: EncoderFleet) -> None:
    assert fleet.views(NOW + 2.5)[0].state == "suspect"
    assert [gone.worker_id for gone in fleet.expire(NOW + 11)] == ["a"]
    assert fleet.views(NOW + 11) == []


def test_ended_epoch_is_refused(fleet: EncoderFleet) -> None:
    place(fleet, "p1", 10)
    fleet.register(registration("a", epoch="e2"), NOW)
    for stale in (
        lambda: fleet.heartbeat(beat("a", epoch="e1"), NOW),
        lambda: fleet.register(registration("a", epoch="e1"), NOW),
    ):
        with pytest.raises(Refusal) as refused:
            stale()
        assert refused.value.code is ErrorCode.STALE_EPOCH
    fleet.heartbeat(beat("a", epoch="e2"), NOW)
    assert queue(fleet) == 0
    fleet.release(ended("p1", Outcome.FAILED, "a"), NOW)  # of the earlier epoch
    assert fleet.views(NOW)[0].state == "ready"


def test_failed_worker_is_on_probation_and_backs_off(fleet: EncoderFleet) -> None:
    for backoff_s in (0.5, 1.0):
        place(fleet, "p")
        fleet.release(ended("p", Outcome.FAILED, "a"), NOW)
        assert fleet.views(NOW)[0].state == "probation"
        worker = fleet.views(NOW + backoff_s)[0]
        assert worker.state == "ready"
        fleet._workers["a"].probation_until = NOW


def test_refusal_is_no_failure(fleet: EncoderFleet) -> None:
    place(fleet, "p")
    fleet.release(ended("p", Outcome.REFUSED, "a"), NOW)
    assert fleet.views(NOW)[0].state == "ready"


def test_readiness_names_the_encoder_and_the_reason(fleet: EncoderFleet) -> None:
    (ready,) = fleet.readiness(NOW)
    assert (ready.model, ready.ready, ready.infos[0].dimension) == ("minilm", True, 8)
    fleet.heartbeat(beat("a", state=WorkerState.NOT_READY, reason="NaN"), NOW)
    (ready,) = fleet.readiness(NOW)
    assert not ready.ready
    assert ready.reason == "no encoder worker is ready: a is not ready (NaN)"


def test_slow_heartbeats_and_too_many_workers_are_refused() -> None:
    fleet = EncoderFleet(FleetLimits(max_workers=1))
    with pytest.raises(Refusal, match="heartbeat_s"):
        fleet.register(registration("a").model_copy(update={"heartbeat_s": 2.0}), NOW)
    fleet.register(registration("a"), NOW)
    with pytest.raises(Refusal, match="max_workers"):
        fleet.register(registration("b"), NOW)
