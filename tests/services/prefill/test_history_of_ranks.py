"""Workers of one, two and three ranks read history from each other, bit for bit.

All ranks are in this process, with a slab and an agent each. Their KV is random: no model runs.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from runtime.config import ModelConfig
from runtime.core.request import Request, SamplingParams
from runtime.engine import Add, Computed, Engine, Reserved
from runtime.pages.prefix import root_hash
from tests.runtime.tiny import prompt_of
from tests.services.prefill.test_history import check_all_is_back, reader_of, service_of
from tests.services.prompts import ask
from tests.services.transfer.ranked_kv import RankedKV
from tests.services.transfer.test_ranks_over_nixl import (
    SIZES,
    THREE_HEADS,
    TWO_HEADS,
    RankedWorker,
)
from tests.services.workers import Decode, Prefill, Site, until

TOKENS, HISTORY = 155, 144
PAGE = 16


class CachingWorker(RankedWorker):
    """A worker whose engine keeps prefixes."""

    def __init__(self, config: ModelConfig, size: int, name: str, seed: int) -> None:
        super().__init__("dense", config, size, name, slots=5)
        self.kv.fill(seed)
        shape = self._first.shape
        options = replace(shape.options, prefix_root=root_hash("ranks"))
        self._first.shape = replace(shape, options=options)


def of_heads(kv: RankedKV, pages: list[int]) -> list[torch.Tensor]:
    """Return pages of all planes with all KV heads, which a worker of one rank would have."""
    found = []
    for number, plane in enumerate(kv.whole.planes):
        whole = torch.empty_like(plane[pages])
        for heads, own in zip(kv.heads, kv.caches, strict=True):
            whole[:, heads.start : heads.stop] = own.planes[number][pages]
        found.append(whole)
    return found


async def fill_cache(decode: Decode) -> None:
    """Let the decode worker have the KV of a prompt."""
    tokens = tuple(prompt_of(TOKENS))
    engine = decode.worker.engine
    engine.submit(Add(Request("before", tokens, TOKENS, SamplingParams(), max_tokens=2)))

    def has_ended(engine: Engine) -> bool:
        return "before" not in engine.scheduler

    while not await engine.run(has_ended):
        pass


async def pages_of_read(prefill: Prefill, decode: Decode) -> tuple[list[int], list[int]]:
    """Read history; return the pages of the decode worker and those of the prefill worker."""
    sender, reader = service_of(decode)._sender, reader_of(prefill)
    add, receive = sender.add_computed, reader.receive
    pinned, received = list[int](), list[int]()

    def recorded(chunk: Computed) -> None:
        pinned.extend(chunk.page_tables[0])
        add(chunk)

    def recorded_too(address: Any, job: Any, reserved: Reserved) -> None:
        received.extend(reserved.page_tables[0])
        receive(address, job, reserved)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sender, "add_computed", recorded)
        patched.setattr(reader, "receive", recorded_too)
        answer = await ask(decode, prefill, prompt_of(TOKENS), answer=2)
    assert not answer.HasField("error"), answer.error
    assert answer.cached_tokens == HISTORY
    return pinned, received[: HISTORY // PAGE]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("codec", [pytest.param("raw", marks=pytest.mark.long), "splitzip"])
@pytest.mark.parametrize(
    "config", [THREE_HEADS, TWO_HEADS], ids=["uneven heads", "copies of a head"]
)
async def test_history_arrives_bit_for_bit_at_any_number_of_ranks(
    site: Site, config: ModelConfig, codec: str
) -> None:
    sizes: dict[str, Any] = {"slots": 3, "codec": codec, "prefix_cache": True}
    for number, (readers, holders) in enumerate(product(SIZES, SIZES)):
        reader = CachingWorker(config, readers, f"{number}-reader", seed=1)
        holder = CachingWorker(config, holders, f"{number}-holder", seed=2)
        prefill = await site.prefill(ranks=reader.ranks, **sizes)
        decode = await site.decode(ranks=holder.ranks, **sizes)
        await fill_cache(decode)
        pinned, received = await pages_of_read(prefill, decode)
        assert len(pinned) == len(received) == HISTORY // PAGE
        sent, arrived = of_heads(holder.kv, pinned), of_heads(reader.kv, received)
        assert all(map(torch.equal, sent, arrived)), (readers, holders)
        await until(lambda w=prefill.worker: w.idle)  # type: ignore[misc]
        await check_all_is_back(prefill, decode)
