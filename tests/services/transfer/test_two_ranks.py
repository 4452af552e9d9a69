"""Workers of two ranks exchange KV with workers of one rank and of two.

Every second rank runs in another process, with half of the KV heads, a slab and a NIXL agent.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.engine import Computed, Engine, LocalExecutor
from runtime.pages.plan import PAGE_SIZE, PageCount
from services.transfer.agent import TransferAgent
from services.transfer.codecs import Books, SegmentCodecs
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.remote_endpoint import RemoteEndpoint, serve_endpoint
from services.transfer.slab import Slab
from services.worker.lifecycle import Worker
from tests.runtime.two_ranks import (
    RANKS,
    TwoRanks,
    two_rank_workers,
    whole_executor,
)
from tests.services.workers import (
    CHUNK,
    SLOT_BYTES,
    Decode,
    Prefill,
    Ranked,
    Site,
    fetch_of,
    normal_codebook,
    open_stream,
    output_of,
    until,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

TOKENS, OUTPUTS = 100, 20
OPTIONS = EngineOptions(
    pages=PageCount(64),
    limits=Limits(max_running=4, max_waiting=8, step_tokens=64, chunk_tokens=CHUNK),
)
SLOTS, SLAB_SLOTS = 3, 5


def books_of(executor: LocalExecutor) -> Books:
    book = normal_codebook()
    return {(layer, plane.name): book for layer, plane in executor.cache.layout.planes}


def start_endpoint(pipe: Connection, name: str, executor: LocalExecutor) -> None:
    """Serve the endpoint of a second rank, in its process."""
    layout = executor.cache.layout
    first = executor.model.config.first_kv_head
    codecs = SegmentCodecs(layout, books_of(executor), first_kv_head=first)
    slab = Slab(SLAB_SLOTS, SLOT_BYTES)
    endpoint = LocalEndpoint(executor.cache, codecs, slab, TransferAgent(name))
    threading.Thread(target=serve_endpoint, args=(pipe, endpoint), daemon=True).start()


@dataclass
class RankedWorker:
    """Executors and endpoints of a worker."""

    ranks: Ranked
    two: TwoRanks | None = None

    @classmethod
    def of_one(cls, options: EngineOptions) -> "RankedWorker":
        executor = whole_executor(options)
        return cls(Ranked(Engine(executor), executor))

    @classmethod
    def of_two(cls, two: TwoRanks, pipe: Connection) -> "RankedWorker":
        endpoint = RemoteEndpoint(pipe, books_of(two.first))
        return cls(Ranked(Engine(two.executor), two.first, (endpoint,)), two)

    def planes(self) -> list[torch.Tensor]:
        """Return all planes, with the KV heads of all ranks, in float32."""
        planes = [plane.float() for plane in self.ranks.first.cache.planes]
        if self.two is None:
            return planes
        return [torch.cat(pair, dim=1) for pair in zip(planes, self.two.planes(), strict=True)]


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankedWorker]]:
    """Two workers of one rank and two of two ranks; those at even indices compute prompts."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ranked_workers(tmp_path, OPTIONS) as started:
        yield started


@contextmanager
def ranked_workers(folder: Path, options: EngineOptions) -> Iterator[list[RankedWorker]]:
    """Start two workers of one rank and two of two ranks. Set GLOO_SOCKET_IFNAME before."""
    ones = [RankedWorker.of_one(options) for _ in range(2)]
    pipes = [Pipe() for _ in range(2)]
    starts = [
        partial(start_endpoint, theirs, f"second-{number}")
        for number, (_, theirs) in enumerate(pipes)
    ]
    with two_rank_workers(str(folder / "rendezvous"), options, *starts) as ranks:
        twos = [RankedWorker.of_two(two, own) for two, (own, _) in zip(ranks, pipes, strict=True)]
        yield ones + twos


async def tokens_of(prefill: Prefill, decode: Decode, number: int) -> list[int]:
    stream = open_stream(decode, prefill, number, TOKENS, OUTPUTS)
    await until(lambda: decode.worker.idle and prefill.worker.idle)
    output = output_of(stream.session)
    assert not output.HasField("error"), output.error
    return [token.token for token in output.tokens]


async def pages_of_fetch(prefill: Prefill, decode: Decode, patch: pytest.MonkeyPatch) -> list[int]:
    """Fetch a prompt into the first pages of the decode worker; return those it was sent from."""
    sender, pages = prefill.worker.sender, list[int]()
    add = sender.add_computed

    def recorded(chunk: Computed) -> None:
        pages.extend(chunk.page_tables[0])
        add(chunk)

    with patch.context() as patched:
        patched.setattr(sender, "add_computed", recorded)
        await decode.worker.receiver.fetch(fetch_of(prefill, TOKENS))
    await until(lambda: prefill.worker.idle)
    return pages


async def test_workers_of_one_and_two_ranks_exchange_kv(
    workers: list[RankedWorker], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pairs give the same tokens, and the KV arrives bit for bit."""
    senders, readers = workers[::2], workers[1::2]
    sizes: dict[str, Any] = {"slots": SLOTS, "codec": "splitzip"}
    prefills = [await site.prefill(ranks=worker.ranks, **sizes) for worker in senders]
    decodes = [await site.decode(ranks=worker.ranks, **sizes) for worker in readers]
    served: list[Worker] = [each.worker for each in prefills]
    served += [each.worker for each in decodes]
    assert [len(worker.endpoints) for worker in served] == [1, RANKS] * 2
    assert [worker.page_bytes for worker in served] == [served[0].page_bytes] * 4
    tokens = list[list[int]]()
    for prefill, sender in zip(prefills, senders, strict=True):
        for decode, reader in zip(decodes, readers, strict=True):
            tokens.append(await tokens_of(prefill, decode, 1 + len(tokens)))
            pages = await pages_of_fetch(prefill, decode, monkeypatch)
            full = TOKENS // PAGE_SIZE
            for sent, arrived in zip(sender.planes(), reader.planes(), strict=True):
                assert arrived[:full].any()
                assert arrived[:full].equal(sent[pages[:full]])
    assert len(tokens[0]) == OUTPUTS
    assert tokens == [tokens[0]] * 4
    for engine in [worker.engine for worker in served]:
        await until(lambda engine=engine: engine.load.pages_free == engine.pages_total)  # type: ignore[misc]
