"""Timelines of requests: stages from the gateway's clock and from the workers' stage times."""

import asyncio
from typing import Any

import pytest

from headrace.v1 import error_pb2
from services.gateway.timeline import Attempt, RequestTimeline, Stage
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import STOP, FakeStream, Script, hang, say, until

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


def two_tokens(site: Site, pause_s: float, **stages: Any) -> Script:
    ids = site.encode("hello there")[:2]

    async def received(count: int) -> None:
        await until(lambda: newest(site).output_tokens == count)

    async def script(stream: FakeStream) -> None:
        for count, id in enumerate(ids, 1):
            await asyncio.sleep(pause_s)
            await stream.tokens(id)
            await received(count)  # tokens that arrive together would have no time between them
        await stream.end(STOP, **stages)

    return script


def newest(site: Site) -> RequestTimeline:
    kept = site.gateway.recent.of(None)
    ended = [*kept.ended, *(group.newest for group in kept.unplaced.values())]
    return max((*kept.running.values(), *ended), key=lambda timeline: timeline.number)


def described(site: Site) -> dict[str, Any]:
    return newest(site).describe(asyncio.get_running_loop().time())


def check_stages(stages: list[Stage], total_s: float) -> list[str]:
    """Check that stages have no overlap and end with the request; return their names."""
    end = 0.0
    for _, start, seconds in stages:
        assert start >= end - 1e-5
        assert seconds > 0
        end = start + seconds
    assert end == pytest.approx(total_s, abs=1e-4)
    return [name for name, _, _ in stages]


async def test_stages_of_a_disaggregated_request(site: Site) -> None:
    site.worker.script = two_tokens(
        site, 0.05, queue=0.01, prefill=0.02, transfer=0.005, verify=0.002, decode=0.03
    )
    assert (await site.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    request = described(site)
    names = check_stages(request["stages"], request["total_s"])
    assert names == ["receive", "route", "queue", "prefill", "transfer", "decode"]
    seconds = {name: duration for name, _, duration in request["stages"]}
    assert (seconds["queue"], seconds["prefill"]) == pytest.approx((0.01, 0.02), abs=1e-3)
    assert seconds["decode"] >= 0.03 - 1e-6
    after_first = request["total_s"] - request["first_token_s"]
    assert seconds["transfer"] + seconds["decode"] == pytest.approx(after_first, abs=1e-5)
    assert (request["read_s"], request["verify_s"]) == (0.005, 0.002)
    assert (request["prefill"], request["decode"]) == ("prefill-0", "decode-0")
    assert request["first_token_s"] >= 0.05
    assert (request["status"], request["output_tokens"], request["attempts"]) == ("ok", 2, 1)


async def test_request_without_a_prefill_worker_has_no_transfer(site: Site) -> None:
    site.router.prefill = None
    site.worker.script = two_tokens(site, 0.01, prefill=0.005, decode=0.005)
    await site.http.post("/v1/chat/completions", json=CHAT)
    request = described(site)
    assert request["prefill"] is None
    names = check_stages(request["stages"], request["total_s"])
    assert names == ["receive", "route", "prefill", "decode"]


async def test_running_request_shows_its_stage_so_far(site: Site) -> None:
    async def script(stream: FakeStream) -> None:
        await stream.tokens(site.encode("hello")[0])
        await stream.cancelled.wait()

    site.worker.script = script
    async with site.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as r:
        await anext(r.aiter_bytes())
        request = described(site)
        assert (request["status"], request["output_tokens"]) == ("running", 1)
        names = check_stages(request["stages"], request["total_s"])
        assert names[-2:] == ["prefill", "transfer"]  # the second token would end the transfer
    await site.router.settled()
    assert described(site)["status"] == "cancelled"


async def test_waiting_request_is_in_the_route_stage(site: Site) -> None:
    site.router.hold = True
    call = asyncio.create_task(site.http.post("/v1/chat/completions", json=CHAT))
    await until(lambda: bool(site.router.headers))  # the router has received the placement request
    request = described(site)
    assert (request["status"], request["decode"], request["first_token_s"]) == (
        "running",
        None,
        None,
    )
    assert check_stages(request["stages"], request["total_s"]) == ["receive", "route"]
    call.cancel()


async def test_failed_attempt_is_a_stage_of_its_own(open_site: OpenSite) -> None:
    site: Site = await open_site(workers=2)

    async def fails(stream: FakeStream) -> None:
        await asyncio.sleep(0.01)
        await stream.fail(error_pb2.ERROR_CODE_INTERNAL, worker_id="decode-0")

    site.workers[0].script = fails
    site.workers[1].script = say(*site.encode("hello"))
    assert (await site.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    request = described(site)
    names = check_stages(request["stages"], request["total_s"])
    assert names[:3] == ["receive", "route", "failed"]
    assert (request["attempts"], request["failures"]) == (2, ["internal"])
    assert request["decode"] == "decode-1"


@pytest.mark.parametrize(
    ("refusals", "settings", "expected"),
    [
        ([(429, "queue_full")], {}, "overloaded"),
        ([(413, "too_large")], {}, "context_length_exceeded"),
        ([], {"deadline_s": 2.0}, "deadline_exceeded"),
    ],
)
async def test_failed_request_has_the_code_of_its_error(
    open_site: OpenSite, refusals: list[tuple[int, str]], settings: dict[str, Any], expected: str
) -> None:
    site: Site = await open_site(**settings)
    site.router.refusals = refusals
    site.worker.script = hang
    assert (await site.http.post("/v1/chat/completions", json=CHAT)).status_code >= 400
    assert described(site)["status"] == expected


async def test_implausible_stage_times_are_ignored(site: Site) -> None:
    site.worker.script = two_tokens(site, 0.01, prefill=1e9, decode=float("inf"), queue=-1)
    await site.http.post("/v1/chat/completions", json=CHAT)
    request = described(site)
    check_stages(request["stages"], request["total_s"])


async def test_timeline_keeps_the_last_eight_attempts(site: Site) -> None:
    site.worker.script = say(*site.encode("hello"))
    await site.http.post("/v1/chat/completions", json=CHAT)
    timeline = newest(site)
    for _ in range(100):
        timeline.route()
    assert (len(timeline.attempts), described(site)["attempts"]) == (8, 101)
    assert isinstance(timeline.attempts[-1], Attempt)
