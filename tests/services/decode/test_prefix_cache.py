"""Workers that keep prefixes: only what is missing is computed and sent, with the same tokens."""

import asyncio
from typing import Any

import pytest

from headrace.v1 import error_pb2
from runtime.engine import Reserved, StepOutput
from services.transfer.fetch import Fetch
from tests.runtime.tiny import prompt_of
from tests.services.prompts import (
    ANSWER,
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


@pytest.mark.long
@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("kv_format", ["dense", "int4"])
async def test_turns_of_a_chat_transfer_what_the_decode_worker_lacks(
    site: Site, kv_format: str, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of the KV that is sent and that arrives are equal, too."""
    shared: dict[str, Any] = {"prefix_cache": True, "kv_format": kv_format, "pages": 100}
    prefill = await site.prefill(read_history=False, **shared)
    decode = await site.decode(**shared)
    cold = await site.decode(colocated=True, kv_format=kv_format, pages=100)
    monkeypatch.setattr(decode.worker.service, "_has_room", lambda: has_room)
    held, known = [], []
    async for found in chat_turns(decode, prefill, cold):
        known.append(found.cached_tokens)
        held.append(value_of(decode, "kv_saved_bytes_total"))
    pages = [p * PAGE for p in ([0, 7, 9, 11] if kv_format == "dense" else [0, 3, 5, 7])]
    assert known == pages, "the prefill worker has the prompts, but no answers"
    assert held[0] == 0
    assert held == sorted(held)
    sent = value_of(prefill, "kv_sent_tokens_total")
    lengths = [120 + turn * (ANSWER + 15) for turn in range(4)]
    assert value_of(decode, "kv_transfer_tokens_total") == sent < 0.7 * sum(lengths)


async def test_second_request_sends_one_page(site: Site) -> None:
    prefill, decode = [await start(prefix_cache=True) for start in (site.prefill, site.decode)]
    assert isinstance(prefill, Prefill)
    assert isinstance(decode, Decode)
    prompt = prompt_of(100)
    cold, warm = [await ask(decode, prefill, prompt) for _ in range(2)]
    other = await ask(decode, prefill, prompt, salt=b"other")
    assert ids_of(cold) == ids_of(warm) == ids_of(other)
    assert [answer.cached_tokens for answer in (cold, warm, other)] == [0, 96, 0]
    await until(lambda: value_of(prefill, "kv_sent_tokens_total") == 204)
    page_bytes = sum(decode.worker.page_bytes.values())
    assert value_of(decode, "kv_saved_bytes_total") == 6 * page_bytes
    await check_idle(prefill, decode)


@pytest.mark.parametrize("asked", [32, 96])
async def test_prefill_worker_sends_pages_that_it_has_and_the_decode_worker_lacks(
    site: Site, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another decode worker has asked for the prompt before; this one has a part of it."""
    prefill = await site.prefill(prefix_cache=True)
    first, second = [await site.decode(prefix_cache=True) for _ in range(2)]
    prompt = prompt_of(100)
    expected = await ask(first, prefill, prompt)
    await ask(second, prefill, prompt[: asked + 1])
    found = await ask(second, prefill, prompt)
    assert ids_of(found) == ids_of(expected)
    assert found.cached_tokens == 96
    await until(lambda: value_of(second, "kv_transfer_tokens_total") == 1 + asked + 100 - asked)
    await check_idle(prefill, first, second)


async def test_prefill_worker_computes_what_only_the_decode_worker_has(site: Site) -> None:
    decode = await site.decode(prefix_cache=True)
    first, second = [await site.prefill(prefix_cache=True, read_history=False) for _ in range(2)]
    prompt = prompt_of(100)
    expected = await ask(decode, first, prompt)
    found = await ask(decode, second, prompt)
    assert ids_of(found) == ids_of(expected)
    assert found.cached_tokens == 0
    assert value_of(second, "kv_sent_tokens_total") == 4
    await check_idle(first, second, decode)


async def test_pages_that_are_evicted_before_the_reservation_are_fetched(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An early fetch asks for the pages that it lacks, and again when others are evicted."""
    prefill, decode = await site.prefill(), await site.decode(prefix_cache=True)
    prompt = prompt_of(100)
    expected = await ask(decode, prefill, prompt)
    evict_after(monkeypatch, decode, "cached_tokens")
    found = await ask(decode, prefill, prompt)
    assert ids_of(found) == ids_of(expected)
    assert value_of(decode, "worker_prefills_given_back_total") == 1
    assert value_of(decode, "kv_transfer_tokens_total") == 200
    await check_idle(prefill, decode)


async def test_reservation_with_fewer_pages_while_the_prefill_is_given_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step defers it. The next one grants it, while the early fetch still stops its decodes."""
    prefill, decode = await site.prefill(), await site.decode(prefix_cache=True, started=False)
    service, engine = decode.worker.service, decode.worker.engine
    monkeypatch.setattr(engine, "cached_tokens", lambda _: 32)
    stopped, stop_decodes = asyncio.Event(), service._receiver._stop_decodes

    async def stop_later(fetch: Fetch) -> None:
        await stopped.wait()
        await stop_decodes(fetch)

    monkeypatch.setattr(service._receiver, "_stop_decodes", stop_later)
    session = send(decode, prefill, prompt_of(100), answer=4)
    await until(lambda: bool(prefill.worker.jobs))
    [stream] = service.streams.values()
    service.deliver(StepOutput(deferred=[stream.key]))
    await until(lambda: stream.early is not None and stream.early.expired())
    assert stream.early is not None, "the early fetch has not ended"
    service.deliver(StepOutput(reserved=[Reserved(stream.key, (tuple(range(7)),), None, 0)]))
    stopped.set()
    engine.start()  # it allocates the same pages
    await until(lambda: not session.streams)
    assert not output_of(session).HasField("error")
    assert len(ids_of(output_of(session))) == 4
    assert value_of(decode, "kv_transfer_tokens_total") == 100
    await check_idle(prefill, decode)


async def test_pages_that_fail_verification_are_not_kept(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await site.prefill(prefix_cache=True), await site.decode(prefix_cache=True)
    prompt = prompt_of(100)
    endpoint = decode.worker.endpoints[0]
    decode_batch = endpoint._decode

    def damage(decoder, payloads):  # type: ignore[no-untyped-def]
        decode.slab.buffer[payloads[-1].offset + payloads[-1].length - 1] ^= 1
        return decode_batch(decoder, payloads)

    monkeypatch.setattr(endpoint, "_decode", damage)
    found = await ask(decode, prefill, prompt)
    assert found.error.code == error_pb2.ERROR_CODE_INTEGRITY
    await check_idle(prefill, decode)
    assert decode.loaded.engine.scheduler.pages.pools[0].cached == 0
    monkeypatch.setattr(endpoint, "_decode", decode_batch)
    again = await ask(decode, prefill, prompt)
    assert not again.HasField("error")
    assert again.cached_tokens == 96, "the prefill worker's own pages are sound"
    assert value_of(decode, "kv_saved_bytes_total") == 0


async def test_colocated_worker_reports_cached_tokens(site: Site) -> None:
    worker = await site.decode(colocated=True, prefix_cache=True)
    prompt = list(prompt_of(100))
    cold = await ask(worker, None, prompt, choices=3)
    warm = await ask(worker, None, [*prompt, *ids_of(cold, 2), 5], choices=3)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 112)
    await check_idle(worker)


async def test_metrics_of_the_cache(site: Site) -> None:
    worker = await site.decode(colocated=True, prefix_cache=True, pages=10)
    for seed in (0, 0, 1, 2):
        await ask(worker, None, prompt_of(100, seed), answer=4)
    assert value_of(worker, "prefix_cache_queries_total") == 400
    assert value_of(worker, "prefix_cache_hits_total") == 96
    assert value_of(worker, "prefix_cache_evictions_total", group="kv") == 9
    assert value_of(worker, "kv_pages_cached", group="kv") == 9
