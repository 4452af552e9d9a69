"""KV pages fill a worker's share of a GPU without exceeding it."""

from dataclasses import replace

import pytest

from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import Purpose, SequenceGroup, SequenceState
from runtime.engine.pages import SequencePages
from runtime.kv.cache import CacheLayout
from runtime.offline.bench.kv_bytes import formats, occupation, one_layer
from runtime.pages.plan import PageCount, PagePlan
from runtime.pages.sizes import PageBytes, least_bytes, pools_of_bytes
from services.common.errors import SettingsError
from services.worker.kv_budget import (
    PREEMPTED_TOKENS,
    RESERVE,
    ROW_BYTES,
    DeviceMemory,
    kv_bytes_for,
)
from services.worker.settings import MAX_KV_TOKENS

GIB = 1 << 30
LLAMA_7B = 32 * 2 * 32 * 128 * 2  # bytes of K and V of a token, bf16: 512 KiB


def dense(per_token: int) -> PageBytes:
    """Return pages of one group with the given bytes per token."""
    return PageBytes(PagePlan(16), (16 * per_token,))


def tokens(memory: DeviceMemory, utilization: float = 0.9, per_token: int = LLAMA_7B) -> int:
    dense_pages = dense(per_token)
    size = kv_bytes_for(
        memory,
        utilization=utilization,
        slab=GIB // 2,
        logits=GIB // 4 // ROW_BYTES,
        least=least_bytes(dense_pages),
    )
    windows = dense_pages.plan.batch(1, 1)
    (pages,) = pools_of_bytes(dense_pages, size, windows, MAX_KV_TOKENS // 16)
    return 16 * pages


def test_pages_fill_a_gpu_without_other_processes() -> None:
    """0.9 of 80 GiB, minus 12 for weights, 0.5 for the slab, and 1.5 for logits and reserve."""
    memory = DeviceMemory(total=80 * GIB, free=67 * GIB, own=12 * GIB)
    assert tokens(memory) == 58 * GIB // LLAMA_7B == 118_784


def test_memory_that_attention_needs_for_each_page_is_left() -> None:
    """`lowrank` on Llama-3-8B at keep 0.6: K and V of one of 32 layers beside the latents."""
    latents, scratch = dense(32 * 1984), 16 * 4096
    allocated = latents.with_scratch(scratch)
    (pages,) = pools_of_bytes(allocated, 40 * GIB, latents.plan.batch(1, 1), 1 << 30)
    assert 0 <= 40 * GIB - latents.of(PageCount(pages)) - pages * scratch < allocated.groups[0]
    assert latents.with_scratch(0) == latents


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


LONG = 8192
LAYERS = 32
H200_KV = 105 * GIB
"""Bytes for KV on a GPU of 141 GB, beside 16 GB of weights, the slab and workspaces."""


def held(plan: PagePlan, pages: PageCount, slots: int) -> int:
    """Return the number of sequences of `LONG` tokens that are admitted and decode 100 tokens.

    All are admitted with received KV and decode in lockstep, so that each needs the most pages
    of its window in the same step.
    """
    allocator = SequencePages(plan, pages)
    request = Request("r", (0,) * LONG, LONG, SamplingParams(), 101)
    running: list[SequenceState] = []
    while len(running) < slots:
        sequence = SequenceState(request, 0, len(running), [0] * LONG, LONG + 101)
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
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "slots"),
    [("fp8", 256), ("fdc, rank 64", 256), ("int4", 512), ("k4v2", 512), ("shard", 1088)],
)
def test_number_of_long_sequences_rises_with_the_compression_ratio(name: str, slots: int) -> None:
    """A context of 131,072 tokens takes no pages of windows from a decode worker's batch."""
    config = replace(one_layer(), context_length=131_072)
    kv_formats = formats(config)
    sequences = {}
    for each in ("dense", name):
        layers = kv_formats[each].planes(0, 16)
        layout = CacheLayout(16, config.num_kv_heads, (layers,) * LAYERS)
        plan = layout.plan
        windows = plan.batch(slots, min(config.context_length, PREEMPTED_TOKENS))
        pages = pools_of_bytes(layout.page_bytes, H200_KV, windows, MAX_KV_TOKENS // 16)
        sequences[each] = held(plan, pages, slots)
    ratio = occupation(kv_formats[name], config, LONG, 100).ratio
    assert sequences["dense"] == H200_KV // (LAYERS * 4096) // (LONG + 112)
    assert sequences[name] < slots, "batch slots are not the limit"
    assert sequences[name] / sequences["dense"] == pytest.approx(ratio, rel=0.05)
