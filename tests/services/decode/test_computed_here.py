"""Decode workers compute the last tokens of prompts whose history they have."""

import asyncio
from unittest.mock import Mock

import pytest

from services.decode import computed_here
from services.decode.prompt_times import PromptTimes
from services.worker.registration import Registrar
from tests.runtime.tiny import prompt_of
from tests.services.prompts import (
    PAGE,
    ask,
    chat_turns,
    check_idle,
    evict_after,
    ids_of,
    send,
    value_of,
)
from tests.services.workers import Decode, Prefill, Site, output_of, until


@pytest.fixture
def faster_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let computing be predicted to be faster, however slow the machine is at the moment."""
    monkeypatch.setattr(computed_here, "is_faster_here", lambda *_: True)


async def pair_of(
    site: Site, compute_tokens: int = 64, kv_format: str = "dense"
) -> tuple[Decode, Prefill]:
    decode = await site.decode(
        prefix_cache=True, compute_tokens=compute_tokens, kv_format=kv_format, pages=100
    )
    return decode, await site.prefill(prefix_cache=True, kv_format=kv_format, pages=100)


def computed_by(decode: Decode) -> float:
    return value_of(decode, "worker_prompts_computed_here_total")


def prefilled_by(prefill: Prefill) -> float:
    return value_of(prefill, "kv_sent_tokens_total")


@pytest.mark.usefixtures("faster_here")
async def test_turns_of_a_chat_have_the_tokens_of_a_cold_worker(site: Site) -> None:
    decode, prefill = await pair_of(site)
    cold = await site.decode(colocated=True, pages=100)
    known, sent = [], 0.0
    async for found in chat_turns(decode, prefill, cold):
        known.append(found.cached_tokens)
        sent = sent or prefilled_by(prefill)
    # The history of a choice is cached up to the last full page with KV.
    assert known == [0, 139 // PAGE * PAGE, 174 // PAGE * PAGE, 209 // PAGE * PAGE]
    assert computed_by(decode) == 3
    assert prefilled_by(prefill) == sent, "the prefill worker has computed the first turn alone"
    assert value_of(decode, "worker_stage_seconds_count", stage="prefill") == 4
    page_bytes = sum(decode.worker.page_bytes.values())
    assert value_of(decode, "kv_saved_bytes_total") == sum(known) // PAGE * page_bytes


@pytest.mark.usefixtures("faster_here")
async def test_routers_learn_which_placements_need_no_prefill_worker(site: Site) -> None:
    decode, prefill = await pair_of(site)
    registrar = decode.worker.registrar = Mock(spec=Registrar)
    for _ in range(2):
        await ask(decode, prefill, prompt_of(100))
    reports = [(name, arguments) for name, arguments, _ in registrar.method_calls]
    first = ["admit", "end"]
    second = ["admit", "postpone", "computed_here", "end"]
    assert reports == [(name, ("placement",)) for name in (*first, *second)]


async def test_first_prompts_are_fetched(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of which less than half is cached are fetched as well, as is the very first one."""
    decode, prefill = await pair_of(site)
    asked: list[object] = []
    monkeypatch.setattr(computed_here, "is_faster_here", lambda *sizes: asked.append(sizes))
    await ask(decode, prefill, prompt_of(40))
    await ask(decode, prefill, prompt_of(40, seed=1))
    await ask(decode, prefill, [*prompt_of(40)[:32], *prompt_of(33, seed=2)])
    assert not asked
    await ask(decode, prefill, prompt_of(40))
    assert len(asked) == 1
    assert computed_by(decode) == 0


@pytest.mark.parametrize("compute_tokens", [0, 5, 6])
@pytest.mark.usefixtures("faster_here")
async def test_no_more_tokens_are_computed_than_allowed(site: Site, compute_tokens: int) -> None:
    decode, prefill = await pair_of(site, compute_tokens)
    prompt = prompt_of(102)
    cold, warm = [await ask(decode, prefill, prompt) for _ in range(2)]
    assert ids_of(cold) == ids_of(warm)
    assert warm.cached_tokens == 96
    assert computed_by(decode) == (compute_tokens == 6)


@pytest.mark.usefixtures("faster_here")
async def test_prompts_beyond_the_limit_are_fetched_while_others_wait(site: Site) -> None:
    """Five prompts have 10 uncached tokens each, and 20 may be computed at a time."""
    decode, prefill = await pair_of(site, compute_tokens=20)
    prompt = prompt_of(96)
    await ask(decode, prefill, prompt)
    prompts = [(*prompt, *prompt_of(10, seed=number)) for number in range(5)]
    sessions = [send(decode, prefill, each) for each in prompts]
    await until(lambda: not any(session.streams for session in sessions))
    assert computed_by(decode) == 2
    await check_idle(decode, prefill)
    cold = await site.decode(colocated=True, pages=100)
    for each, session in zip(prompts, sessions, strict=True):
        assert ids_of(output_of(session)) == ids_of(await ask(cold, None, each))


async def test_prompts_are_fetched_if_that_is_predicted_to_be_faster(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computed_here, "is_faster_here", lambda *_: False)
    decode, prefill = await pair_of(site)
    for _ in range(2):
        await ask(decode, prefill, prompt_of(100))
    assert computed_by(decode) == 0
    assert prefilled_by(prefill) == 104


@pytest.mark.usefixtures("faster_here")
async def test_prompts_of_compressed_formats_are_fetched(site: Site) -> None:
    """The decode worker does not have the full-precision pages to which a prompt attends."""
    decode, prefill = await pair_of(site, kv_format="int4")
    cold, warm = [await ask(decode, prefill, prompt_of(150)) for _ in range(2)]
    assert ids_of(cold) == ids_of(warm)
    assert computed_by(decode) == 0
    await check_idle(decode, prefill)


@pytest.mark.usefixtures("faster_here")
async def test_kv_is_fetched_if_pages_are_evicted_before_the_reservation(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prefill = await pair_of(site)
    prompt = prompt_of(100)
    expected = await ask(decode, prefill, prompt)
    evict_after(monkeypatch, decode, "uncached_tokens")
    found = await ask(decode, prefill, prompt)
    assert ids_of(found) == ids_of(expected)
    assert found.cached_tokens == 96, "the prefill worker has them"
    assert computed_by(decode) == 0
    assert prefilled_by(prefill) == 200
    await check_idle(decode, prefill)


@pytest.mark.usefixtures("faster_here")
async def test_delivered_tokens_are_not_repeated_after_a_failover(site: Site) -> None:
    """A gateway sends them behind the prompt."""
    decode, prefill = await pair_of(site)
    prompt = prompt_of(100)
    delivered = ids_of(cold := await ask(decode, prefill, prompt))[:7]
    found = await ask(decode, prefill, [*prompt, *delivered], replayed=7)
    assert [t.index for t in found.tokens] == list(range(7, 20))
    assert delivered + ids_of(found) == ids_of(cold)
    assert computed_by(decode) == 1


@pytest.mark.usefixtures("faster_here")
async def test_tokens_that_were_really_computed_are_measured(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of the prompt is cached when it is admitted than when its path is chosen."""
    decode, prefill = await pair_of(site)
    computed: list[float] = []
    monkeypatch.setattr(
        PromptTimes, "add_computed", lambda _times, tokens, _s, _now: computed.append(tokens)
    )
    prompt = prompt_of(100)
    await ask(decode, prefill, prompt)
    monkeypatch.setattr(decode.worker.engine, "uncached_tokens", lambda _: 36)
    found = await ask(decode, prefill, prompt)
    assert (computed, found.cached_tokens) == ([4], 96)
    page_bytes = sum(decode.worker.page_bytes.values())
    assert value_of(decode, "kv_saved_bytes_total") == 96 // PAGE * page_bytes


@pytest.mark.usefixtures("faster_here")
async def test_cancelled_streams_return_their_pages(site: Site) -> None:
    decode, prefill = await pair_of(site)
    prompt = prompt_of(100)
    await ask(decode, prefill, prompt)
    for wait in (False, True):
        session = send(decode, prefill, prompt, answer=200)
        if wait:
            await until(lambda: bool(output_of(session).tokens))  # noqa: B023 - awaited at once
        [stream] = session.streams.values()
        session.end(stream)
        await check_idle(decode, prefill)
    await asyncio.sleep(0)
    assert not decode.worker.service.streams
