"""Workers of one, two and three ranks transfer KV with gRPC sessions and NIXL READs.

All ranks are in this process, with a slab and an agent each. Their KV is random: no model runs.
`test_two_ranks` has models, and ranks in other processes.
"""

import asyncio
import gc
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from runtime.config import ModelConfig
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.engine import Computed, Engine, ExecutorShape
from services.transfer.agent import TransferAgent
from services.transfer.codecs import SegmentCodecs
from services.transfer.errors import TransferClosed
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.slab import Slab
from tests.runtime.engine.fake_executor import FakeExecutor
from tests.runtime.tiny import CONFIG, tiny_model
from tests.services.transfer.ranked_kv import RankedKV
from tests.services.workers import (
    CHUNK,
    SLOT_BYTES,
    Decode,
    Prefill,
    Ranked,
    Site,
    fetch_of,
    until,
)

pytestmark = pytest.mark.slow

SIZES = (1, 2, 3)
PAGES, TOKENS = 24, 155
SLOTS = 3
LIMITS = Limits(max_running=4, max_waiting=8, step_tokens=64, chunk_tokens=CHUNK)

THREE_HEADS = replace(CONFIG, num_heads=6, num_kv_heads=3)
"""Two ranks have one KV head and two."""
TWO_HEADS = replace(CONFIG, num_heads=6, num_kv_heads=2)
"""Two of three ranks have the same KV head."""


class StoredKV(FakeExecutor):
    """Executor of the first rank, whose pages already hold KV."""

    def __init__(self, config: ModelConfig, kv: RankedKV) -> None:
        super().__init__(PAGES, LIMITS)
        self.model = tiny_model()  # not used, but described in a metric
        self.cache = kv.caches[0]
        assert {each.events.record() for each in kv.caches} == {self.record_event()}
        plan = self.cache.layout.plan
        self.shape = ExecutorShape(config, plan, EngineOptions(plan.each(PAGES), LIMITS))


class RankedWorker:
    """KV and endpoints of a worker."""

    def __init__(
        self, kind: str, config: ModelConfig, size: int, name: str, slots: int = SLOTS
    ) -> None:
        self.kv = RankedKV.of(config, size, PAGES, kind)
        self._first: Any = StoredKV(config, self.kv)
        self._others = tuple(
            LocalEndpoint(
                own,
                SegmentCodecs(own.layout, self.kv.books(), first_kv_head=heads.start),
                Slab(slots, SLOT_BYTES),
                TransferAgent(f"{name}-{rank}"),
            )
            for rank, (heads, own) in enumerate(zip(self.kv.heads, self.kv.caches, strict=True))
            if rank
        )

    @property
    def ranks(self) -> Ranked:
        return Ranked(Engine(self._first), self._first, self._others)


async def pages_of_fetch(prefill: Prefill, decode: Decode) -> list[list[int]]:
    """Fetch a prompt into the first pages of the decode worker.

    Returns:
        For each page group, the pages that it was sent from.
    """
    sender, found = prefill.worker.sender, list[list[int]]()
    add = sender.add_computed

    def recorded(chunk: Computed) -> None:
        found[:] = found or [[] for _ in chunk.page_tables]
        for pages, more in zip(found, chunk.page_tables, strict=True):
            pages.extend(more)
        add(chunk)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sender, "add_computed", recorded)
        await decode.worker.receiver.fetch(fetch_of(prefill, TOKENS))
    await until(lambda: prefill.worker.idle)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("config", "kind", "codec"),
    [
        pytest.param(THREE_HEADS, "dense", "splitzip", id="uneven heads"),
        pytest.param(TWO_HEADS, "dense", "auto", id="copies of a head"),
        pytest.param(THREE_HEADS, "int4", "raw", id="blocks of planes"),
    ],
)
async def test_kv_arrives_bit_for_bit_at_any_number_of_ranks(
    site: Site, config: ModelConfig, kind: str, codec: str
) -> None:
    sizes: dict[str, Any] = {"slots": SLOTS, "codec": codec, "kv_format": kind}
    senders = [RankedWorker(kind, config, size, f"sender-{size}") for size in SIZES]
    readers = [RankedWorker(kind, config, size, f"reader-{size}") for size in SIZES]
    prefills = [await site.prefill(ranks=each.ranks, **sizes) for each in senders]
    decodes = [await site.decode(ranks=each.ranks, **sizes) for each in readers]
    for sender in senders:
        sender.kv.fill()
    for (prefill, sender), (decode, reader) in product(
        zip(prefills, senders, strict=True), zip(decodes, readers, strict=True)
    ):
        reader.kv.fill(seed=1)
        pages = await pages_of_fetch(prefill, decode)
        sent = prefill.worker.sent_tokens(fetch_of(prefill, TOKENS).request, 0)
        assert reader.kv.holds(sender.kv, sent, pages)
        arrived = await decode.worker.digest([range(PAGES)] * len(pages), sent)
        assert arrived == await prefill.worker.digest(pages, sent)
        reader.kv.caches[-1].planes[0][0, -1, 0, 0] += 1
        assert arrived != await decode.worker.digest([range(PAGES)] * len(pages), sent)
        assert prefill.worker.sender.slots_in_use == 0
        assert {landing.held for landing in decode.worker.receiver.landing} == {0}
    for engine in [prefill.worker.engine for prefill in prefills]:
        await until(lambda engine=engine: engine.load.pages_free == engine.pages_total)  # type: ignore[misc]


async def test_cancelled_fetch_reads_the_errors_of_all_ended_ranks(
    site: Site, monkeypatch: pytest.MonkeyPatch, unhandled: list[dict[str, Any]]
) -> None:
    """The other rank has ended, while the codec of the first still runs."""
    sender, reader = (RankedWorker("dense", THREE_HEADS, 2, name) for name in ("sender", "reader"))
    sizes: dict[str, Any] = {"slots": SLOTS, "codec": "raw"}
    prefill = await site.prefill(ranks=sender.ranks, started=False, **sizes)
    decode = await site.decode(ranks=reader.ranks, **sizes)
    idle: list[Future[None]] = [Future(), Future()]
    idle[1].set_exception(TransferClosed("the process of a rank has ended"))
    for endpoint, found in zip(decode.worker.endpoints, idle, strict=True):
        monkeypatch.setattr(endpoint, "codec_idle", lambda found=found: found)
    fetching = asyncio.create_task(decode.worker.receiver.fetch(fetch_of(prefill, TOKENS)))
    await until(lambda: prefill.worker.sender.active == 1)
    fetching.cancel()
    await asyncio.sleep(0.01)
    assert not fetching.done()
    idle[0].set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await fetching
    gc.collect()
    assert not unhandled
