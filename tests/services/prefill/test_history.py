"""A prefill worker reads history from the decode worker that has it, or computes it."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from headrace.v1 import error_pb2
from headrace.v1 import prefill_pb2 as pb
from services.prefill import history as history_module
from services.prefill.history import HistoryReader
from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.fetch import FetchFailed
from services.worker.prefill_service import PrefillService
from services.worker.prefill_session import PrefillSession
from services.worker.streams import StreamSession
from tests.runtime.tiny import prompt_of
from tests.services.prompts import (
    PAGE,
    ask,
    check_idle,
    ids_of,
    send,
    value_of,
)
from tests.services.workers import LIMIT_S, Decode, Prefill, Site, fetch_of, output_of, until

Prompt = Sequence[int]


class HeldReads(TransferAgent):
    """Runs READs, but reports their results only after `report_all`."""

    holds = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.held: list[tuple[Future[ReadDone], Future[ReadDone]]] = []

    def read(self, *args: object, **kwargs: object) -> "Future[ReadDone]":
        done = super().read(*args, **kwargs)  # type: ignore[arg-type]
        if not self.holds:
            return done
        heard: Future[ReadDone] = Future()
        self.held.append((done, heard))
        return heard

    def report_all(self) -> None:
        for done, heard in self.held:
            heard.set_result(done.result(LIMIT_S))
        self.held.clear()


def reader_of(prefill: Prefill) -> HistoryReader:
    assert prefill.worker.history is not None
    return prefill.worker.history


def service_of(decode: Decode) -> PrefillService:
    assert decode.worker.history is not None
    return decode.worker.history


async def pair(site: Site, **changes: Any) -> tuple[Prefill, Decode]:
    prefill = await site.prefill(HeldReads, prefix_cache=True, **changes)
    return prefill, await site.decode(prefix_cache=True, **changes)


async def check_all_is_back(prefill: Prefill, *decodes: Decode) -> None:
    """Wait until no page, lease, slot or sequence is in use on either side."""
    await until(lambda: not reader_of(prefill)._tasks)
    landing = reader_of(prefill)._receiver.landing
    await until(lambda: all(each.held == each.quarantined == 0 for each in landing))
    for decode in decodes:
        service = service_of(decode)
        await until(lambda s=service: not s.jobs)  # type: ignore[misc]
        await until(lambda s=service: not s._sender.active and not s._sender.slots_in_use)  # type: ignore[misc]
        await until(lambda d=decode: value_of(d, "kv_lease_active") == 0)  # type: ignore[misc]
        await until(lambda d=decode: not any(d.landing_slots().values()))  # type: ignore[misc]
    await check_idle(prefill, *decodes)


async def first_turn(decode: Decode, prefill: Prefill) -> Prompt:
    """Play one turn of a chat; return the prompt of the next one."""
    prompt = prompt_of(70)
    answer = await ask(decode, prefill, prompt)
    await check_all_is_back(prefill, decode)
    return (*prompt, *ids_of(answer), *prompt_of(15, seed=1))


async def expected(site: Site, prompt: Prompt, **changes: Any) -> list[int]:
    """Return the answer of a worker without a cache."""
    cold = await site.decode(colocated=True, **changes)
    return ids_of(await ask(cold, None, prompt))


HISTORY = 80
"""Tokens of the second turn that the decode worker has; the prefill worker has 64 of them."""


@pytest.mark.few(2)
@pytest.mark.parametrize("kv_format", ["dense", "lowrank"])
@pytest.mark.parametrize("codec", ["raw", "splitzip"])
async def test_history_of_a_chat_is_read_instead_of_computed(
    site: Site, kv_format: str, codec: str
) -> None:
    prefill, decode = await pair(site, kv_format=kv_format, codec=codec)
    cold = await site.decode(colocated=True, kv_format=kv_format)
    prompt = list(prompt_of(70))
    known, held, read = [], 0, 0
    for turn in range(3):
        choices = 3 if turn == 1 else 1
        answer = await ask(decode, prefill, prompt, choices=choices)
        other = await ask(cold, None, prompt, choices=choices)
        for choice in range(choices):
            assert ids_of(answer, choice) == ids_of(other, choice)
        known.append(answer.cached_tokens)
        read += known[-1] - held
        held = len(prompt) // PAGE * PAGE  # what the prefill worker has computed
        prompt += [*ids_of(answer, choices - 1), *prompt_of(15, seed=turn)]
        await check_all_is_back(prefill, decode)
    assert known == [0, 80, 112], "all but the last token of the answer"
    assert value_of(prefill, "kv_history_tokens_total") == read == 32
    page_bytes = sum(decode.worker.page_bytes.values())
    assert value_of(prefill, "kv_history_bytes_total") == read // PAGE * page_bytes
    assert value_of(prefill, "kv_history_failures_total", reason="not_cached") == 0


async def test_another_prefill_worker_reads_the_whole_history(site: Site) -> None:
    first, decode = await pair(site)
    prompt = await first_turn(decode, first)
    second = await site.prefill(prefix_cache=True)
    answer = await ask(decode, second, prompt)
    assert ids_of(answer) == await expected(site, prompt)
    assert answer.cached_tokens == HISTORY
    assert value_of(second, "kv_history_tokens_total") == HISTORY
    assert value_of(decode, "kv_sent_tokens_total") == HISTORY
    await check_all_is_back(second, decode)
    again = await ask(decode, second, prompt)
    assert again.cached_tokens == len(prompt) // PAGE * PAGE, "the pages are cached now"
    assert value_of(second, "kv_history_tokens_total") == HISTORY


async def test_other_salts_read_nothing(site: Site) -> None:
    prefill, decode = await pair(site)
    prompt = await first_turn(decode, prefill)
    answer = await ask(decode, prefill, prompt, salt=b"other")
    assert answer.cached_tokens == 0
    assert value_of(prefill, "kv_history_tokens_total") == 0


async def test_nothing_is_read_if_that_is_switched_off(site: Site) -> None:
    prefill = await site.prefill(prefix_cache=True, read_history=False)
    decode = await site.decode(prefix_cache=True)
    assert prefill.worker.history is None
    prompt = prompt_of(70)
    turn = await ask(decode, prefill, prompt)
    longer = [*prompt, *ids_of(turn), *prompt_of(15, seed=1)]
    answer = await ask(decode, prefill, longer)
    assert ids_of(answer) == await expected(site, longer)
    assert answer.cached_tokens == 64
    await check_idle(prefill, decode)


@pytest.mark.parametrize("changes", [{"kv_format": "int4"}, {"kv_eviction": 0.25}])
async def test_history_is_not_offered_where_a_prefill_needs_other_pages(
    site: Site, changes: dict[str, Any]
) -> None:
    prefill = await site.prefill(prefix_cache=True, pages=100, **changes)
    decode = await site.decode(prefix_cache=True, pages=100, **changes)
    assert prefill.worker.history is None
    assert decode.worker.history is None
    assert prefill.worker.sizes.history_slots == decode.worker.sizes.history_slots == 0
    assert not decode.worker._hello.address


async def test_slow_link_makes_the_prefill_worker_compute(site: Site) -> None:
    prefill, decode = await pair(site)
    prompt = await first_turn(decode, prefill)
    reader = reader_of(prefill)
    reader._tokens_per_s = 1e3
    peer = decode.worker.identity.worker_id
    for _ in range(2):
        reader._policy.least_tokens(peer, 1, token_bytes=1, tokens_per_s=1, now=0)
        reader._policy.arrived(peer, 1 << 20, latency_s=10.0, transfer_s=10.0)
    answer = await ask(decode, prefill, prompt)
    assert ids_of(answer) == await expected(site, prompt)
    assert answer.cached_tokens == 64
    assert value_of(prefill, "kv_history_tokens_total") == 0


def lose_pages(prefill: Prefill, decode: Decode, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decode.loaded.engine.scheduler.pages, "pin", lambda group: False)


def flip_a_bit(prefill: Prefill, decode: Decode, patch: pytest.MonkeyPatch) -> None:
    endpoint = prefill.worker.endpoints[0]
    decode_batch = endpoint._decode

    def damage(decoder, payloads):  # type: ignore[no-untyped-def]
        prefill.slab.buffer[payloads[-1].offset + payloads[-1].length - 1] ^= 1
        return decode_batch(decoder, payloads)

    patch.setattr(endpoint, "_decode", damage)


def lose_the_service(prefill: Prefill, decode: Decode, patch: pytest.MonkeyPatch) -> None:
    for session in prefill.worker.prefills._sessions:
        session.reader.address = "127.0.0.1:1"


def restart(prefill: Prefill, decode: Decode, patch: pytest.MonkeyPatch) -> None:
    for session in prefill.worker.prefills._sessions:
        session.reader.epoch = "f" * 32


def never_answer(prefill: Prefill, decode: Decode, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(history_module, "_UNMEASURED_WAIT_S", 0.5)
    patch.setattr(history_module, "_LEAST_WAIT_S", 0.5)
    submit = PrefillSession._submit

    def drop_pins(self: PrefillSession, job: Any) -> None:
        if not job.start.cached:
            submit(self, job)

    patch.setattr(PrefillSession, "_submit", drop_pins)


def drain(prefill: Prefill, decode: Decode, patch: pytest.MonkeyPatch) -> None:
    start = PrefillSession._start

    def start_while_draining(self: PrefillSession, message: pb.StartPrefill) -> None:
        decode.worker.draining = message.cached
        start(self, message)
        decode.worker.draining = False

    patch.setattr(PrefillSession, "_start", start_while_draining)


def raise_a_bug(prefill: Prefill, decode: Decode, patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no memory")

    patch.setattr(prefill.worker.endpoints[0], "decode", fail)


Fault = Callable[[Prefill, Decode, pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lose_pages, "not_cached"),
        (flip_a_bit, "integrity"),
        (lose_the_service, "decode_lost"),
        (restart, "incompatible"),
        (never_answer, "deadline"),
        (drain, "draining"),
        (raise_a_bug, "internal"),
    ],
)
async def test_history_that_does_not_arrive_is_computed(
    site: Site, fault: Fault, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await pair(site)
    prompt = await first_turn(decode, prefill)
    with monkeypatch.context() as patch:
        fault(prefill, decode, patch)
        answer = await ask(decode, prefill, prompt)
        assert not answer.HasField("error"), answer.error
        assert ids_of(answer) == await expected(site, prompt)
        assert answer.cached_tokens == 64
        assert value_of(prefill, "kv_history_failures_total", reason=reason) == 1
        assert value_of(prefill, "kv_history_tokens_total") == 0
        await check_all_is_back(prefill, decode)
    longer = [*prompt, *ids_of(answer), *prompt_of(15, seed=2)]
    after = await ask(decode, prefill, longer)
    assert ids_of(after) == await expected(site, longer)
    reads = value_of(prefill, "kv_history_tokens_total") > 0
    assert reads is (reason == "not_cached"), "after other failures, nothing is read for a while"
    await check_all_is_back(prefill, decode)


async def test_damaged_history_is_not_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = await pair(site)
    prompt = await first_turn(decode, prefill)
    pool = prefill.loaded.engine.scheduler.pages.pools[0]
    kept: list[int] = []
    submit = prefill.worker.engine.submit

    def count(*commands: Any) -> None:
        kept.append(len(pool._pages))
        submit(*commands)

    with monkeypatch.context() as patch:
        flip_a_bit(prefill, decode, patch)
        patch.setattr(prefill.worker.engine, "submit", count)
        await ask(decode, prefill, prompt)
    assert set(kept[:2]) == {4}, "the pages of the first prompt alone, until the rest is computed"
    assert value_of(prefill, "kv_integrity_failures_total") == 1
    await check_all_is_back(prefill, decode)


async def reading(prefill: Prefill, decode: Decode, prompt: Prompt) -> StreamSession:
    """Start a request, and wait until the READ of its history is held."""
    agent = prefill.agent
    assert isinstance(agent, HeldReads)
    agent.holds = True
    session = send(decode, prefill, prompt)
    await until(lambda: len(agent.held) > 0)
    agent.holds = False
    return session


async def test_request_that_is_cancelled_during_a_read_returns_everything(site: Site) -> None:
    """No page is freed while a READ or a decode may write to it."""
    prefill, decode = await pair(site)
    prompt = await first_turn(decode, prefill)
    session = await reading(prefill, decode, prompt)
    engine = prefill.worker.engine
    session.end(session.streams[next(iter(session.streams))])
    await until(lambda: prefill.worker.idle and not service_of(decode).jobs)
    prefill.agent.report_all()  # type: ignore[attr-defined]
    await check_all_is_back(prefill, decode)
    assert engine.load.pages_free == engine.pages_total
    again = await ask(decode, prefill, prompt)
    assert ids_of(again) == await expected(site, prompt)
    assert again.cached_tokens == HISTORY
    assert value_of(prefill, "kv_history_tokens_total") == 16


async def test_lease_of_a_reader_that_does_not_go_on_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.decode.service._HISTORY_LEASE_S", 0.3)
    prefill, decode = await pair(site)
    prompt = await first_turn(decode, prefill)
    session = await reading(prefill, decode, prompt)
    assert len(service_of(decode).jobs) == 1

    def expired() -> bool:
        decode.worker.observe()
        return not service_of(decode).jobs

    await until(expired)
    await until(lambda: not session.streams)
    assert ids_of(output_of(session)) == await expected(site, prompt)
    prefill.agent.report_all()  # type: ignore[attr-defined]
    assert value_of(prefill, "kv_history_failures_total", reason="lease_expired") == 1
    await check_all_is_back(prefill, decode)


async def test_prefill_worker_that_disconnects_during_a_read_holds_no_page(site: Site) -> None:
    prefill, decode = await pair(site)
    prompt = await first_turn(decode, prefill)
    session = await reading(prefill, decode, prompt)
    await reader_of(prefill)._clients.close()
    await until(lambda: not session.streams)
    assert ids_of(output_of(session)) == await expected(site, prompt)
    prefill.agent.report_all()  # type: ignore[attr-defined]
    assert value_of(prefill, "kv_history_failures_total", reason="decode_lost") == 1
    await check_all_is_back(prefill, decode)


async def test_forward_transfers_go_on_after_the_end_of_a_session_of_history(site: Site) -> None:
    """Both sessions use the agent of the other worker, and the first to end does not remove it."""
    prefill, decode = await pair(site)
    await ask(decode, prefill, await first_turn(decode, prefill))
    await reader_of(prefill)._clients.close()
    await until(lambda: not service_of(decode)._sessions)
    notified: list[str] = []
    announced = decode.worker.receiver.announced
    heard = announced.notified

    def record(peer: str, message: bytes) -> None:
        notified.append(peer)
        heard(peer, message)

    announced.notified = record  # type: ignore[method-assign]
    assert not (await ask(decode, prefill, prompt_of(50, seed=9))).HasField("error")
    assert prefill.agent.name in notified


async def test_pinned_pages_need_no_free_page(site: Site) -> None:
    """The decode worker is full, so that nothing could be allocated there."""
    prefill, decode = await pair(site)
    prompt = await first_turn(decode, prefill)
    pool = decode.loaded.engine.scheduler.pages.pools[0]
    pin = decode.loaded.engine.scheduler.pages.pin
    taken: list[int] = []

    def pin_without_free_pages(group: Any) -> bool:
        taken.extend(pool.allocate(pool.free))
        found = pin(group)
        pool.release(taken)
        return found

    decode.loaded.engine.scheduler.pages.pin = pin_without_free_pages  # type: ignore[method-assign]
    answer = await ask(decode, prefill, prompt)
    assert (answer.cached_tokens, len(taken) > 0) == (HISTORY, True)
    await check_all_is_back(prefill, decode)


async def test_chats_of_several_decode_workers_end_with_few_pages(site: Site) -> None:
    """Prompts that wait for history hold pages for a bounded time, and block no one for longer."""
    prefill = await site.prefill(HeldReads, prefix_cache=True, pages=24)
    decodes = [await site.decode(prefix_cache=True, pages=40) for _ in range(2)]
    cold = await site.decode(colocated=True)
    prompts = [list(prompt_of(60, seed=seed)) for seed in range(6)]
    for turn in range(3):
        answers = await asyncio.gather(
            *(ask(decodes[at % 2], prefill, prompt) for at, prompt in enumerate(prompts))
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert not answer.HasField("error"), answer.error
            assert ids_of(answer) == ids_of(await ask(cold, None, prompt))
            prompt += [*ids_of(answer), *prompt_of(9, seed=turn)]
    assert value_of(prefill, "kv_history_tokens_total") > 0
    await check_all_is_back(prefill, *decodes)


async def test_decode_worker_computes_no_prompts_of_others(site: Site) -> None:
    prefill, decode = await pair(site)
    await ask(decode, prefill, await first_turn(decode, prefill))
    fetch = fetch_of(prefill, 100)
    fetch.prefill = prefill.worker.prefills._sessions[0].reader
    with pytest.raises(FetchFailed, match="does not compute prompts") as failed:
        await reader_of(prefill)._receiver.fetch(fetch)
    assert failed.value.code == error_pb2.ERROR_CODE_INVALID
    await check_all_is_back(prefill, decode)


@pytest.mark.parametrize("first", [8, 96, (1 << 32) - PAGE])
async def test_malformed_request_for_history_is_refused(site: Site, first: int) -> None:
    prefill, decode = await pair(site)
    await ask(decode, prefill, await first_turn(decode, prefill))
    client = await reader_of(prefill)._clients.connect(prefill.worker.prefills._sessions[0].reader)
    with client.subscribe() as subscription:
        start = pb.StartPrefill(
            sequence=subscription._sequence,
            request=fetch_of(prefill, 90).request,
            deadline_s=LIMIT_S,
            first_token=first,
            cached=True,
        )
        client.send(pb.PrefillCommand(start=start))
        event = await asyncio.wait_for(subscription.next_event(), LIMIT_S)
        assert event is not None
        assert event.failed.error.code == error_pb2.ERROR_CODE_INVALID
    await check_all_is_back(prefill, decode)
