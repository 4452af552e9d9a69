"""Worker failures: retries, replay, and final errors."""

import asyncio
import gc
import json
from typing import Any

import pytest

from headrace.v1 import error_pb2
from services.common.token_ids import unpack_tokens
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.failures import PROMPT, completion, failing, outcomes
from tests.services.gateway.fakes import FakeStream, say, until


async def test_failure_before_the_first_token_is_retried_elsewhere(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    site.workers[0].script = failing(error_pb2.ERROR_CODE_INTERNAL)
    site.workers[1].script = say(*site.encode("right"))
    response = await completion(site)
    assert response.json()["choices"][0]["text"] == "right"
    await site.router.settled()
    assert outcomes(site) == [("failed", "decode-0"), ("ok", None)]
    assert [p.exclude for p in site.router.places] == [[], ["decode-0"]]
    assert [p.attempt for p in site.router.places] == [0, 1]
    assert site.workers[1].streams[0].start.request.attempt == 1
    assert site.metric("headrace_failovers_total", reason="internal") == 1


async def test_worker_that_refuses_connections_is_replaced_at_once(open_site: OpenSite) -> None:
    """A worker that has just been killed is placed until the router misses its heartbeats."""
    site: Site = await open_site(workers=2, connect_timeout_s=60)
    await site.workers[0].stop()
    site.workers[1].script = say(5)
    async with asyncio.timeout(30):
        assert (await completion(site)).status_code == 200
    assert [p.exclude for p in site.router.places] == [[], ["decode-0"]]


async def test_refusal_by_admission_is_not_a_failure(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    site.workers[0].script = failing(error_pb2.ERROR_CODE_OVERLOADED)
    site.workers[1].script = say(5)
    assert (await completion(site)).status_code == 200
    await site.router.settled()
    assert outcomes(site) == [("refused", "decode-0"), ("ok", None)]


async def test_prefill_worker_can_be_blamed(site: Site) -> None:
    lost = failing(error_pb2.ERROR_CODE_PREFILL_LOST, blame="prefill-0")
    site.worker.queued = [lost]
    site.worker.script = say(5)
    # The retry first excludes the only prefill worker, then uses it again for lack of another.
    assert (await completion(site)).status_code == 200
    await site.router.settled()
    assert outcomes(site) == [("failed", "prefill-0"), ("ok", None)]
    assert [p.exclude for p in site.router.places] == [[], ["prefill-0"], []]


async def test_nobody_is_blamed_for_an_expired_lease(site: Site) -> None:
    site.worker.queued = [failing(error_pb2.ERROR_CODE_LEASE_EXPIRED, blame="prefill-0")]
    site.worker.script = say(5)
    assert (await completion(site)).status_code == 200
    await site.router.settled()
    assert outcomes(site) == [("failed", None), ("ok", None)]
    assert [p.exclude for p in site.router.places] == [[], ["prefill-0"], []]


async def test_failure_after_tokens_is_replayed_elsewhere(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    ids = site.encode("one two three 😀 four")
    site.workers[0].script = failing(error_pb2.ERROR_CODE_INTERNAL, *ids[:5])
    site.workers[1].script = say(*ids)
    body = {**PROMPT, "stream": True, "logprobs": 0}
    response = await site.http.post("/v1/completions", json=body)
    lines = [line[6:] for line in response.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "one two three 😀 four"
    sent = [c["choices"][0]["logprobs"]["tokens"] for c in chunks if c["choices"][0]["logprobs"]]
    assert sum(len(tokens) for tokens in sent) == len(ids)
    assert lines[-1] == "[DONE]"
    first, second = (worker.streams[0].start.request for worker in site.workers[:2])
    assert unpack_tokens(second.tokens) == (10, 11, 12, *ids[:5])
    assert second.prompt_tokens == 3
    assert second.max_tokens == 20
    assert second.sampling == first.sampling
    assert site.router.places[1].prompt_tokens == 3 + 5
    await site.router.settled()
    assert outcomes(site) == [("failed", "decode-0"), ("ok", None)]


async def test_output_does_not_continue_on_another_version_of_the_model(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(workers=2)
    site.workers[1].script = say(7, 8, 9)

    async def upgrade(stream: FakeStream) -> None:
        site.router.model_info = {"model_hash": "new"}
        await failing(error_pb2.ERROR_CODE_DRAINING, 5, 6)(stream)

    site.workers[0].script = upgrade
    answer = await completion(site)
    assert answer.status_code == 503
    assert "different versions" in answer.json()["error"]["message"]
    assert site.workers[1].streams == []
    await site.router.settled()
    assert outcomes(site)[-1] == ("failed", None)


async def test_output_that_has_not_begun_may_move_to_another_version(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    site.workers[1].script = say(*site.encode("one two"))

    async def upgrade(stream: FakeStream) -> None:
        site.router.model_info = {"model_hash": "new"}
        await failing(error_pb2.ERROR_CODE_DRAINING)(stream)

    site.workers[0].script = upgrade
    assert (await completion(site)).json()["choices"][0]["text"] == "one two"


@pytest.mark.parametrize("refusal", [(429, "queue_full"), (408, "queue_timeout")])
async def test_further_prompt_of_a_list_waits_for_capacity(
    site: Site, refusal: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal would discard the answers to the other prompts."""

    async def refuse_after_the_first() -> None:
        if len(site.router.places) == 1:
            site.router.refusals = [refusal] * 2

    monkeypatch.setattr(site.router, "_block", refuse_after_the_first)
    site.worker.script = say(*site.encode("one two"))
    body = {"prompt": ["a", "b"], "max_tokens": 4}
    answer = await site.http.post("/v1/completions", json=body)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["one two"] * 2
    assert len(site.router.places) == 4
    await site.router.settled()


async def test_killed_worker_fails_its_streams_at_once(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    ids = site.encode("one two three")

    async def two_then_silence(stream: FakeStream) -> None:
        await stream.tokens(*ids[:2])
        await stream.cancelled.wait()

    site.workers[0].script = two_then_silence
    site.workers[1].script = say(*ids)
    answers = [asyncio.create_task(completion(site)) for _ in range(3)]
    await site.router.started(3)
    await asyncio.sleep(0.05)
    await site.workers[0].stop()
    for answer in answers:
        assert (await answer).json()["choices"][0]["text"] == "one two three"
    await site.router.settled()
    assert outcomes(site).count(("failed", "decode-0")) == 3
    assert site.metric("headrace_failovers_total", reason="worker_lost") == 3


async def test_lost_session_leaves_no_pending_task(
    site: Site, unhandled: list[dict[str, Any]]
) -> None:
    site.worker.script = say(5)
    assert (await completion(site)).status_code == 200
    await site.worker.stop()
    await until(lambda: not site.gateway._sessions._sessions)
    for _ in range(2):
        gc.collect()
        await asyncio.sleep(0.05)  # the event loop closes asynchronous generators in tasks
    assert not unhandled


async def test_failure_after_tokens_of_several_choices_is_an_error(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    site.workers[0].script = failing(error_pb2.ERROR_CODE_INTERNAL, 5)
    response = await completion(site, n=2)
    assert response.status_code == 503
    assert "n > 1" in response.json()["error"]["message"]
    assert site.workers[1].streams == []
    await site.router.settled()


async def test_failure_after_the_last_token_is_not_retried(site: Site) -> None:
    eos = site.model.tokenizer.eos_ids[-1]
    site.worker.queued = [failing(error_pb2.ERROR_CODE_INTERNAL, 5, eos)]
    stopped = await completion(site)
    site.worker.queued = [failing(error_pb2.ERROR_CODE_INTERNAL, *[5] * 20)]
    full = await completion(site)
    reasons = [r.json()["choices"][0]["finish_reason"] for r in (stopped, full)]
    assert reasons == ["stop", "length"]
    assert len(site.worker.streams) == 2


async def test_error_in_a_stream_is_its_last_event(site: Site) -> None:
    site.worker.script = failing(error_pb2.ERROR_CODE_INVALID, 5)
    response = await completion(site, stream=True)
    lines = [line for line in response.text.splitlines() if line]
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == ("invalid_request_error", "scripted failure")
    labels = {"endpoint": "/v1/completions", "status": "400"}
    assert site.metric("headrace_requests_total", **labels) == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (error_pb2.ERROR_CODE_INVALID, 400),
        (error_pb2.ERROR_CODE_CANCELLED, 500),
        (error_pb2.ERROR_CODE_DEADLINE, 504),
        (error_pb2.ERROR_CODE_NOT_FINITE, 500),
    ],
)
async def test_final_errors_are_not_retried(site: Site, code: int, status: int) -> None:
    site.worker.script = failing(code)
    assert (await completion(site)).status_code == status
    assert len(site.worker.streams) == 1
    await site.router.settled()
    assert outcomes(site) == [("failed", None)], "no worker is to blame"


@pytest.mark.parametrize(
    ("code", "status"),
    [(error_pb2.ERROR_CODE_OVERLOADED, 429), (error_pb2.ERROR_CODE_TRANSFER_FAILED, 503)],
)
async def test_attempts_are_bounded(open_site: OpenSite, code: int, status: int) -> None:
    site: Site = await open_site(max_attempts=3)
    site.worker.script = failing(code)
    assert (await completion(site)).status_code == status
    assert len(site.worker.streams) == 3
    await site.router.settled()


async def test_lost_workers_of_one_request_are_bounded(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(workers=3, max_attempts=5, max_lost_workers=2)
    for worker in site.workers:
        worker.script = failing(error_pb2.ERROR_CODE_PREFILL_LOST)
    answer = await completion(site)
    assert answer.status_code == 503
    assert "2 workers were lost during this request" in answer.json()["error"]["message"]
    assert [len(worker.streams) for worker in site.workers] == [1, 1, 0]
    await site.router.settled()


async def test_lost_worker_that_is_tried_again_is_counted_once(open_site: OpenSite) -> None:
    """A router may name a dead worker until its heartbeats are missed."""
    site: Site = await open_site(max_attempts=5, max_lost_workers=2)
    lost = failing(error_pb2.ERROR_CODE_PREFILL_LOST, blame="prefill-0")
    site.worker.queued = [lost] * 3
    site.worker.script = say(5)
    assert (await completion(site)).status_code == 200
    await site.router.settled()
    assert outcomes(site) == [("failed", "prefill-0")] * 3 + [("ok", None)]


async def test_worker_that_the_request_did_not_reach_is_not_a_lost_worker(
    open_site: OpenSite,
) -> None:
    """A host that fails ends several workers, which routers know only after missed heartbeats."""
    site: Site = await open_site(workers=3, max_lost_workers=1)
    for dead in site.workers[:2]:
        await dead.stop()
    site.workers[2].script = say(5)
    assert (await completion(site)).status_code == 200
    await site.router.settled()
    assert outcomes(site) == [("failed", "decode-0"), ("failed", "decode-1"), ("ok", None)]


async def test_restarted_worker_is_another_lost_worker(open_site: OpenSite) -> None:
    site: Site = await open_site(max_attempts=5, max_lost_workers=2)

    async def crash(stream: FakeStream) -> None:
        await stream.fail(error_pb2.ERROR_CODE_PREFILL_LOST, worker_id=site.worker.worker_id)
        site.worker.epoch = f"epoch-{len(site.worker.streams)}"

    site.worker.script = crash
    answer = await completion(site)
    assert answer.status_code == 503
    assert "2 workers were lost during this request" in answer.json()["error"]["message"]
    assert len(site.worker.streams) == 2
    await site.router.settled()


async def test_lost_prefill_and_decode_workers_are_counted_together(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=3, max_attempts=5, max_lost_workers=2)
    site.workers[0].queued = [failing(error_pb2.ERROR_CODE_PREFILL_LOST, blame="prefill-0")]

    async def die(stream: FakeStream) -> None:
        await stream.tokens(5)
        await asyncio.shield(asyncio.create_task(stream.worker.stop()))

    site.workers[0].script = die
    answer = await completion(site)
    assert answer.status_code == 503
    assert "2 workers were lost during this request" in answer.json()["error"]["message"]
    assert [len(worker.streams) for worker in site.workers] == [2, 0, 0]
    await site.router.settled()


async def test_lost_workers_are_bounded_for_each_prompt_of_a_list(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=4, max_attempts=5, max_lost_workers=2)
    for worker in site.workers:
        worker.script = failing(error_pb2.ERROR_CODE_PREFILL_LOST)
    answer = await completion(site, prompt=[[10, 11], [12, 13]])
    assert answer.status_code == 503
    await site.router.settled()
    assert sum(len(worker.streams) for worker in site.workers) <= 4


async def test_stream_outlasts_the_drains_of_a_rolling_restart(open_site: OpenSite) -> None:
    """Each worker drains in turn, more often than `max_attempts` and `max_lost_workers` allow."""
    site: Site = await open_site(workers=2, max_attempts=3, max_lost_workers=1)
    ids = site.encode("one two three four five six seven")

    async def drain_after_one(stream: FakeStream) -> None:
        at = stream.replayed
        await stream.tokens(ids[at])
        await stream.fail(error_pb2.ERROR_CODE_DRAINING)

    for worker in site.workers:
        worker.queued = [drain_after_one] * 3
        worker.script = say(*ids)
    response = await completion(site)
    assert response.json()["choices"][0]["text"] == "one two three four five six seven"
    assert sum(len(worker.streams) for worker in site.workers) == 7
    await site.router.settled()
    assert {outcome for outcome, _ in outcomes(site)} == {"refused", "ok"}
    assert all(len(place.exclude) <= 1 for place in site.router.places)


async def test_drains_without_progress_are_bounded(open_site: OpenSite) -> None:
    site: Site = await open_site(max_attempts=3)
    site.worker.script = failing(error_pb2.ERROR_CODE_DRAINING)
    assert (await completion(site)).status_code == 429
    assert len(site.worker.streams) == 3
    await site.router.settled()


@pytest.mark.parametrize("broken", ["repeated", "skipped", "choice", "reason"])
async def test_protocol_violation_of_a_worker_is_retried_elsewhere(
    open_site: OpenSite, broken: str
) -> None:
    site: Site = await open_site(workers=2)
    ids = site.encode("one two three")

    async def script(stream: FakeStream) -> None:
        await stream.tokens(*ids[:1])
        stream._sent[0] += {"repeated": -1, "skipped": 1}.get(broken, 0)
        if broken == "choice":
            await stream.end(choice=1)
        elif broken == "reason":
            await stream.end(0)
        else:
            await stream.tokens(*ids[1:])

    site.workers[0].script = script
    site.workers[1].script = say(*ids)
    response = await completion(site)
    assert response.json()["choices"][0]["text"] == "one two three"
    replayed = site.workers[1].streams[0].start.request
    assert unpack_tokens(replayed.tokens) == (10, 11, 12, ids[0])


async def test_unknown_error_code_of_a_worker_is_an_internal_failure(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    site.workers[0].script = failing(99)
    site.workers[1].script = say(5)
    assert (await completion(site)).status_code == 200
    await site.router.settled()
    assert outcomes(site) == [("failed", "decode-0"), ("ok", None)]
    assert site.metric("headrace_failovers_total", reason="internal") == 1
