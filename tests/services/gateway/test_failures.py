"""Workers, routers and clients that fail: each request ends once, right or with a typed error, and
every placement is given back exactly once."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from headrace.v1 import error_pb2
from services.common.placement import Outcome, PlaceRequest
from services.gateway.gateway import ServedModel
from services.gateway.router_client import RouterClient
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import (
    FakeRouter,
    FakeStream,
    FakeWorker,
    Script,
    hang,
    say,
    until,
)

PROMPT = {"prompt": [10, 11, 12], "max_tokens": 20}


def failing(code: int, *first: int, blame: str = "") -> Script:
    """Sends some tokens, then fails."""

    async def script(stream: FakeStream) -> None:
        if first:
            await stream.tokens(*first)
        await stream.fail(code, worker_id=blame)

    return script


def outcomes(site: Site) -> list[tuple[str, str | None]]:
    assert len({r.placement_id for r in site.router.releases}) == len(site.router.releases)
    return [(r.outcome.value, r.blame) for r in site.router.releases]


async def completion(site: Site, **changes: Any) -> httpx.Response:
    return await site.http.post("/v1/completions", json={**PROMPT, **changes})


async def test_a_failure_before_the_first_token_is_placed_elsewhere(open_site: OpenSite) -> None:
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


async def test_a_refusal_by_admission_is_no_fault(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    site.workers[0].script = failing(error_pb2.ERROR_CODE_OVERLOADED)
    site.workers[1].script = say(5)
    assert (await completion(site)).status_code == 200
    await site.router.settled()
    assert outcomes(site) == [("refused", "decode-0"), ("ok", None)]


async def test_the_prefill_worker_can_be_to_blame(site: Site) -> None:
    lost = failing(error_pb2.ERROR_CODE_PREFILL_LOST, blame="prefill-0")
    site.worker.queued = [lost]
    site.worker.script = say(5)
    # It is the only one: first it is avoided, then it is better than none.
    assert (await completion(site)).status_code == 200
    await site.router.settled()
    assert outcomes(site) == [("failed", "prefill-0"), ("ok", None)]
    assert [p.exclude for p in site.router.places] == [[], ["prefill-0"], []]


async def test_after_tokens_the_rest_is_replayed_elsewhere(open_site: OpenSite) -> None:
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
    assert list(second.tokens) == [10, 11, 12, *ids[:5]]
    assert second.prompt_tokens == 3
    assert second.max_tokens == 20
    assert second.sampling == first.sampling
    assert site.router.places[1].prompt_tokens == 3 + 5
    await site.router.settled()
    assert outcomes(site) == [("failed", "decode-0"), ("ok", None)]


async def test_a_killed_worker_fails_its_streams_at_once(open_site: OpenSite) -> None:
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


async def test_n_choices_end_with_an_error_after_their_first_tokens(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)
    site.workers[0].script = failing(error_pb2.ERROR_CODE_INTERNAL, 5)
    response = await completion(site, n=2)
    assert response.status_code == 503
    assert "n > 1" in response.json()["error"]["message"]
    assert site.workers[1].streams == []
    await site.router.settled()


async def test_an_answer_that_was_complete_needs_no_other_worker(site: Site) -> None:
    (eos,) = site.model.tokenizer.eos_ids
    site.worker.queued = [failing(error_pb2.ERROR_CODE_INTERNAL, 5, eos)]
    stopped = await completion(site)
    site.worker.queued = [failing(error_pb2.ERROR_CODE_INTERNAL, *[5] * 20)]
    full = await completion(site)
    reasons = [r.json()["choices"][0]["finish_reason"] for r in (stopped, full)]
    assert reasons == ["stop", "length"]
    assert len(site.worker.streams) == 2


async def test_an_error_in_a_stream_is_its_last_event(site: Site) -> None:
    site.worker.script = failing(error_pb2.ERROR_CODE_INVALID, 5)
    response = await completion(site, stream=True)
    lines = [line for line in response.text.splitlines() if line]
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == ("invalid_request_error", "told to fail")
    labels = {"endpoint": "/v1/completions", "status": "400"}
    assert site.metric("headrace_requests_total", **labels) == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (error_pb2.ERROR_CODE_INVALID, 400),
        (error_pb2.ERROR_CODE_CANCELLED, 500),
        (error_pb2.ERROR_CODE_DEADLINE, 504),
    ],
)
async def test_some_failures_are_final(site: Site, code: int, status: int) -> None:
    site.worker.script = failing(code)
    assert (await completion(site)).status_code == status
    assert len(site.worker.streams) == 1


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


async def test_a_request_that_may_be_what_ends_workers_takes_few_with_it(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(max_attempts=5, max_lost_workers=2)
    site.worker.script = failing(error_pb2.ERROR_CODE_PREFILL_LOST)
    answer = await completion(site)
    assert answer.status_code == 503
    assert "2 workers ended under this request" in answer.json()["error"]["message"]
    assert len(site.worker.streams) == 2
    await site.router.settled()


@pytest.mark.parametrize("broken", ["repeated", "skipped", "choice", "reason"])
async def test_a_worker_that_breaks_the_order_is_not_believed(
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
    assert list(site.workers[1].streams[0].start.request.tokens) == [10, 11, 12, ids[0]]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_before", [0, 2])
async def test_a_client_that_leaves_cancels_all_the_way_down(
    site: Site, stream: bool, tokens_before: int
) -> None:
    async def script(down: FakeStream) -> None:
        if tokens_before:
            await down.tokens(*[5] * tokens_before)
        await down.cancelled.wait()

    site.worker.script = script
    asking = asyncio.create_task(completion(site, stream=stream))
    await site.router.started(1)
    await asyncio.sleep(0.05)
    asking.cancel()
    async with asyncio.timeout(5):
        await site.worker.streams[0].cancelled.wait()
    await site.router.settled()
    assert outcomes(site) == [("cancelled", None)]
    labels = {"endpoint": "/v1/completions", "status": "499"}
    await until(lambda: site.metric("headrace_requests_total", **labels) == 1)
    assert site.metric("headrace_num_requests_running") == 0


async def test_a_client_that_leaves_while_its_place_is_parked(site: Site) -> None:
    site.router.hold = True
    asking = asyncio.create_task(completion(site))
    await asyncio.sleep(0.1)
    asking.cancel()
    await until(lambda: site.router.abandoned == 1)
    await until(lambda: site.metric("headrace_num_requests_running") == 0)
    assert site.router.places == []


async def test_a_bug_is_told_as_a_fault_of_ours(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.gateway, "ready", None)
    response = await site.http.get("/ready")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"]


async def test_one_bad_prompt_of_several_cancels_the_others(site: Site) -> None:
    site.worker.queued = [hang, failing(error_pb2.ERROR_CODE_INVALID), hang]
    response = await completion(site, prompt=[[1], [2], [3]])
    assert response.status_code == 400
    async with asyncio.timeout(5):
        await site.worker.streams[0].cancelled.wait()
        await site.worker.streams[2].cancelled.wait()
    await site.router.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_deadline(open_site: OpenSite, stream: bool) -> None:
    site: Site = await open_site(deadline_s=0.3)
    response = await completion(site, stream=stream)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert 0 < site.worker.streams[0].start.deadline_s <= 0.3
    async with asyncio.timeout(5):
        await site.worker.streams[0].cancelled.wait()
    await site.router.settled()


async def test_a_restarted_worker_is_another_session(site: Site) -> None:
    site.worker.script = say(5)
    assert (await completion(site)).status_code == 200
    site.worker.script = hang
    held = asyncio.create_task(completion(site))
    await site.router.started(2)
    site.worker.epoch = "another-life"
    site.worker.script = say(5)
    assert (await completion(site)).status_code == 200
    assert (await held).status_code == 200  # its session was dropped, and it was placed again
    assert site.worker.streams[-1].start.epoch == "another-life"
    assert len(site.worker.metadata) == 2


async def test_a_client_that_reads_slowly_is_given_up(open_site: OpenSite) -> None:
    site: Site = await open_site(stream_buffer_tokens=64)

    async def flood(stream: FakeStream) -> None:
        await stream.tokens(*[5] * 65)
        await stream.cancelled.wait()

    site.worker.script = flood
    response = await completion(site, max_tokens=100)
    assert response.status_code == 503
    assert "slowly" in response.json()["error"]["message"]
    await site.router.settled()


async def test_draining(open_site: OpenSite) -> None:
    site: Site = await open_site()
    release = asyncio.Event()

    async def script(stream: FakeStream) -> None:
        await stream.tokens(5)
        await release.wait()
        await stream.end()

    site.worker.script = script
    running = asyncio.create_task(completion(site))
    await site.router.started(1)
    draining = asyncio.create_task(site.gateway.drain(5))
    await asyncio.sleep(0.01)
    refused = await completion(site)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    ready = await site.http.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
    assert (await site.http.get("/health")).status_code == 200
    assert not draining.done()
    release.set()
    assert (await running).status_code == 200
    await draining


async def test_what_outlasts_the_drain_ends_with_an_error(site: Site) -> None:
    running = asyncio.create_task(completion(site))
    await site.router.started(1)
    await site.gateway.drain(0.05)
    assert (await running).status_code == 503
    await site.router.settled()


async def test_another_router_places_where_one_is_down(model: ServedModel) -> None:
    up, down = FakeRouter([FakeWorker("decode-0")], model.name), FakeRouter([], model.name)
    down.down = True
    asked: list[str] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return await (up if request.url.host == "up" else down).handle(request)

    client = RouterClient(
        ["http://down", "http://up/"],
        token=None,
        timeout_s=1,
        transport=httpx.MockTransport(handle),
    )
    wanted = PlaceRequest(request_id="r", prompt_tokens=1, max_tokens=1)
    placed = await client.place(wanted)
    assert placed.router == "http://up"
    await client.place(wanted)
    client.release(placed, Outcome.OK)
    await client.close()
    assert asked == ["down", "up", "up", "up"]
    assert up.releases[0].placement_id == placed.placement.placement_id
