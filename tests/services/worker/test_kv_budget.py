"""KV pages fill a worker's share of a GPU without exceeding it."""

import pytest

from services.common.errors import SettingsError
from services.worker.kv_budget import RESERVE, ROW_BYTES, DeviceMemory, kv_tokens_for
from services.worker.settings import MAX_KV_TOKENS

GIB = 1 << 30
LLAMA_7B = 32 * 2 * 32 * 128 * 2  # bytes of K and V of a token, bf16: 512 KiB


def tokens(memory: DeviceMemory, utilization: float = 0.9, per_token: int = LLAMA_7B) -> int:
    return kv_tokens_for(
        memory,
        utilization=utilization,
        slab=GIB // 2,
        logits=GIB // 4 // ROW_BYTES,
        bytes_per_token=per_token,
        page_size=16,
    )


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
    missing = r"3\.21 GiB are missing.*use 0\.45 .*allocated 12\.00 GiB"
    with pytest.raises(SettingsError, match=missing):
        tokens(memory, 0.45)
