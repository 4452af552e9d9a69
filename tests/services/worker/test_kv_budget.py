"""KV pages fill a worker's share of a GPU without exceeding it."""

from dataclasses import replace

import pytest
import torch

from runtime.bench.kv_bytes import formats, occupation, one_layer
from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import Purpose, Sequence, SequenceGroup
from runtime.engine.pages import SequencePages
from runtime.kv.cache import CacheLayout
from runtime.kv.compressed import COMPRESSED, FULL_PRECISION
from runtime.kv.format import KV, Plane
from runtime.pages.plan import PageCount, PagePlan
from services.common.errors import SettingsError
from services.worker.kv_budget import (
    PREEMPTED_TOKENS,
    RESERVE,
    ROW_BYTES,
    DeviceMemory,
    kv_bytes_for,
    least_bytes,
    pages_of_bytes,
    pages_of_tokens,
)
from services.worker.settings import MAX_KV_TOKENS
from tests.runtime.pages.plans import compressed_plan

GIB = 1 << 30
LLAMA_7B = 32 * 2 * 32 * 128 * 2  # bytes of K and V of a token, bf16: 512 KiB


def layout(per_token: int, stored: int = 0) -> CacheLayout:
    """Return a layout with the given bytes per token, in exact and in stored pages."""
    group = FULL_PRECISION if stored else KV
    planes = [Plane("exact", torch.uint8, (1, 16, per_token), encodable=False, group=group)]
    if stored:
        planes.append(
            Plane("stored", torch.uint8, (1, 16, stored), encodable=False, group=COMPRESSED)
        )
    return CacheLayout(16, 1, (tuple(planes),))


def tokens(memory: DeviceMemory, utilization: float = 0.9, per_token: int = LLAMA_7B) -> int:
    planes = layout(per_token)
    size = kv_bytes_for(
        memory,
        utilization=utilization,
        slab=GIB // 2,
        logits=GIB // 4 // ROW_BYTES,
        least=least_bytes(planes),
    )
    return 16 * pages_of_bytes(size, planes, 1).exact


def test_pages_fill_a_gpu_without_other_processes() -> None:
    """0.9 of 80 GiB, minus 12 for weights, 0.5 for the slab, and 1.5 for logits and reserve."""
    memory = DeviceMemory(total=80 * GIB, free=67 * GIB, own=12 * GIB)
    assert tokens(memory) == 58 * GIB // LLAMA_7B == 118_784


def test_memory_of_other_processes_is_not_used() -> None:
    memory = DeviceMemory(total=80 * GIB, free=20 * GIB, own=12 * GIB)
    assert tokens(memory) == 18 * GIB // LLAMA_7B


def test_two_workers_with_half_each_fit_in_any_order() -> None:
    """The second worker finds less free memory, but not less than its share."""
    first = tokens(DeviceMemory(total=80 * GIB, free=67 * GIB, own=12 * GIB), 0.45)
    taken = 12 * GIB + GIB // 2 + RESERVE + first * LLAMA_7B
    assert taken <= 36 * GIB
    free = 80 * GIB - taken - 12 * GIB
    assert tokens(DeviceMemory(total=80 * GIB, free=free, own=12 * GIB), 0.45) == first


def test_token_slots_are_whole_pages() -> None:
    size = 2 * GIB + 100 * LLAMA_7B
    assert tokens(DeviceMemory(total=size, free=size, own=0), 1.0) == 96


def test_pages_are_bounded_by_the_largest_setting() -> None:
    memory = DeviceMemory(total=80 * GIB, free=80 * GIB, own=0)
    assert tokens(memory, per_token=16) == MAX_KV_TOKENS


def test_error_names_the_missing_bytes() -> None:
    """The share is 10.8 of 24 GiB; 14 GiB and one page of 8 MiB are needed, 3.21 GiB more."""
    memory = DeviceMemory(total=24 * GIB, free=11 * GIB, own=12 * GIB)
    missing = r"3\.21 GiB short.*use 0\.45 .*allocated 12\.00 GiB"
    with pytest.raises(SettingsError, match=missing):
        tokens(memory, 0.45)


def test_compressed_formats_get_exact_pages_for_a_batch_and_a_prompt() -> None:
    """6 pages for each of 256 sequences, 512 for 8,192 tokens; the rest of 60 GiB is stored."""
    planes = layout(LLAMA_7B, LLAMA_7B // 4)
    exact = compressed_plan().batch(256, 8192)[0]
    assert exact == 6 * 256 + 512
    found = pages_of_bytes(60 * GIB, planes, exact)
    assert found == PageCount(exact, (60 * GIB - exact * 16 * LLAMA_7B) // (4 * LLAMA_7B))


def test_exact_pages_take_at_most_half_of_the_memory() -> None:
    planes = layout(LLAMA_7B, LLAMA_7B // 4)
    assert pages_of_bytes(GIB, planes, 10_000) == PageCount(64, 256)
    least = pages_of_bytes(least_bytes(planes), planes, 10_000)
    assert least.exact == 1
    assert least.stored >= 1


def test_token_slots_are_those_of_stored_pages() -> None:
    planes = layout(64, 16)
    assert pages_of_tokens(16_384, planes, 960) == PageCount(960, 1024)
    assert pages_of_tokens(160, planes, 960) == PageCount(10, 10)
    assert pages_of_tokens(160, layout(64), 960) == PageCount(10)


LONG = 8192
LAYERS = 32
H200_KV = 105 * GIB
"""Bytes for KV on a GPU of 141 GB, beside 16 GB of weights, the slab and workspaces."""


def held(pages: PageCount, slots: int) -> int:
    """Return the number of sequences of `LONG` tokens that are admitted and decode 100 tokens.

    All are admitted with received KV and decode in lockstep, so that each needs its most exact
    pages in the same step.
    """
    allocator = SequencePages(compressed_plan() if len(pages) > 1 else PagePlan(16), pages)
    request = Request("r", (0,) * LONG, LONG, SamplingParams(), 101)
    running: list[Sequence] = []
    while len(running) < slots:
        sequence = Sequence(request, 0, len(running), [0] * LONG, LONG + 101)
        group = SequenceGroup(Purpose.RECEIVE, [sequence])
        if not allocator.need(group).fits(allocator.free):
            break
        allocator.admit(group)
        running.append(sequence)
    for sequence in running:
        sequence.tokens.append(0)
    for _ in range(100):
        for sequence in allocator.plan.lacking(running):
            missing = allocator.plan.missing(sequence)
            if not missing.fits(allocator.free):
                allocator.release([sequence])  # preempted
                running.remove(sequence)
                continue
            allocator.grow(sequence, missing)
        for sequence in running:
            sequence.tokens.append(0)
            allocator.release_left(sequence, len(sequence.tokens) - 1)
    return len(running)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slots"),
    [("fp8", 256), ("fdc, rank 64", 256), ("int4", 512), ("k4v2", 512), ("shard", 1088)],
)
def test_number_of_long_sequences_rises_with_the_compression_ratio(name: str, slots: int) -> None:
    """A context of 131,072 tokens takes no exact pages from a decode worker's batch."""
    config = replace(one_layer(), context_length=131_072)
    kv_formats = formats(config)
    sequences = {}
    for each in ("dense", name):
        layers = kv_formats[each].planes(0, 16)
        cache = CacheLayout(16, config.num_kv_heads, (layers,) * LAYERS)
        exact = cache.plan.batch(slots, min(config.context_length, PREEMPTED_TOKENS))[0]
        sequences[each] = held(pages_of_bytes(H200_KV, cache, exact), slots)
    ratio = occupation(kv_formats[name], config, LONG, 100).ratio
    assert sequences["dense"] == H200_KV // (LAYERS * 4096) // (LONG + 112)
    assert sequences[name] < slots, "batch slots are not the limit"
    assert sequences[name] / sequences["dense"] == pytest.approx(ratio, rel=0.05)
