"""A decode worker that has the KV of a prompt's first pages asks for the others alone."""

from functools import partial
from operator import add as add_pages

import pytest
import torch

from headrace.v1 import error_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.core.sequence import SequenceGroup
from runtime.engine import Computed
from runtime.pages.plan import PAGE_SIZE
from tests.services.transfer.sampled_streams import idle, start, tokens_of
from tests.services.workers import Decode, Prefill, Site, fetch_of, session_with, start_of, until

TOKENS = 100


def digests_of(prefill: Prefill, decode: Decode, patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the digests which both workers compute."""
    found: list[str] = []
    for worker in (prefill.worker, decode.worker):
        digest = worker.digest

        def recorded(digest, *arguments):  # type: ignore[no-untyped-def]
            future = digest(*arguments)
            future.add_done_callback(lambda done: found.append(done.result()))
            return future

        patch.setattr(worker, "digest", partial(recorded, digest))
    return found


def sent_bytes(prefill: Prefill) -> float:
    value = prefill.worker.metrics.registry.get_sample_value
    return value("headrace_kv_sent_bytes_total", {"kind": "raw"}) or 0.0


@pytest.mark.parametrize("first", [0, PAGE_SIZE, 64, 96])
@pytest.mark.parametrize("kv_format", ["dense", "int4"])
async def test_pages_before_the_first_token_are_neither_sent_nor_written_to(
    site: Site, kv_format: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = await site.prefill(kv_format=kv_format)
    decode = await site.decode(kv_format=kv_format)
    computed: list[Computed] = []
    add = prefill.worker.sender.add_computed

    def recorded(chunk: Computed) -> None:
        computed.append(chunk)
        add(chunk)

    monkeypatch.setattr(prefill.worker.sender, "add_computed", recorded)
    fetch = fetch_of(prefill, TOKENS, first_token=first)
    await decode.worker.receiver.fetch(fetch)
    tables: tuple[tuple[int, ...], ...] = ((),) * len(fetch.sent.plan.groups)
    for chunk in computed:
        tables = tuple(map(add_pages, tables, chunk.page_tables))
    arrived = await decode.worker.digest(fetch.reserved.result().page_tables, fetch.sent)
    assert arrived == await prefill.worker.digest(tables, fetch.sent)
    for plane in decode.planes():
        assert not plane[: first // PAGE_SIZE].any()
    await until(lambda: prefill.worker.idle)


async def test_prompt_of_which_all_pages_are_there_sends_first_tokens_alone(site: Site) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    fetch = fetch_of(prefill, 96, first_token=96)
    received: list[pb.FirstTokens] = []

    def on_first(first: pb.FirstTokens) -> bool:
        received.append(first)
        return False

    fetch.on_first = on_first
    assert (await decode.worker.receiver.fetch(fetch)).segments == 0
    assert [first.prefill_s > 0 for first in received] == [True]
    await until(lambda: prefill.worker.idle)


async def test_reserved_sequence_fetches_what_its_pages_lack(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and digests equal those of a sequence that fetches everything."""
    reused = 64
    prefill, decode = await site.prefill(kv_digest=True), await site.decode(kv_digest=True)
    digests = digests_of(prefill, decode, monkeypatch)
    monkeypatch.setattr(decode.worker.service, "_has_room", lambda: False)
    pages = decode.loaded.engine.scheduler.pages
    admit = pages.admit
    kept: list[torch.Tensor] = []

    def admit_and_copy(group: SequenceGroup) -> None:
        admit(group)
        own = group.sequences[0].page_tables[0][: reused // PAGE_SIZE]
        for plane, content in zip(decode.planes(), kept, strict=False):
            plane[own] = content
            group.reused = reused

    def keep_pages(group: SequenceGroup) -> None:
        admit(group)
        tables.append(group.sequences[0].page_tables[0])

    tables: list[list[int]] = []
    monkeypatch.setattr(pages, "admit", keep_pages)
    whole = start(decode.worker.service, decode, TOKENS, prefill)
    await until(lambda: idle(prefill, decode))
    first_bytes = sent_bytes(prefill)
    # Nothing has used the pages since.
    kept += [plane[tables[0][: reused // PAGE_SIZE]].clone() for plane in decode.planes()]
    monkeypatch.setattr(pages, "admit", admit_and_copy)
    rest = start(decode.worker.service, decode, TOKENS, prefill)
    await until(lambda: idle(prefill, decode))
    assert tokens_of(rest) == tokens_of(whole)
    await until(lambda: len(digests) == 4)
    assert digests[0] == digests[1] != digests[2] == digests[3]
    await until(lambda: sent_bytes(prefill) >= first_bytes * (1 + (TOKENS - reused) / TOKENS))
    assert sent_bytes(prefill) == first_bytes * (1 + (TOKENS - reused) / TOKENS)


@pytest.mark.parametrize("first", [8, 99, 112, (1 << 32) - PAGE_SIZE])
async def test_first_token_off_a_page_or_out_of_bounds_is_refused(site: Site, first: int) -> None:
    prefill = await site.prefill()
    async with session_with(prefill) as session:
        begin = start_of(TOKENS)
        begin.first_token = first
        await session.send(pb.PrefillCommand(start=begin))
        event = await session.event()
        assert event.failed.error.code == error_pb2.ERROR_CODE_INVALID
        assert f"KV cannot be sent from token {first} of {TOKENS}" in event.failed.error.message
    assert not prefill.worker.jobs
