"""The size of a worker's KV page pool on a GPU."""

from dataclasses import dataclass
from typing import Self

import torch

from services.common.errors import SettingsError
from services.worker.settings import MAX_KV_TOKENS

CPU_TOKENS = 16_384
"""Default token slots on the CPU, whose memory other processes need as well."""
RESERVE = 5 << 28
"""Bytes (1.25 GiB) for CUDA's context, graphs and activations."""
ROW_BYTES = 60
"""Bytes of sampling tables and workspace for each logit of a decode step."""
_GIB = 1 << 30


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device after a worker's weights were loaded, in bytes.

    Attributes:
        total: size of the memory.
        free: bytes not allocated by any process.
        own: bytes that this worker has allocated.
    """

    total: int
    free: int
    own: int

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """Measure the memory of a GPU, after freeing memory that only loading needed."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))


def kv_tokens_for(
    memory: DeviceMemory,
    *,
    utilization: float,
    slab: int,
    logits: int,
    bytes_per_token: int,
    page_size: int,
) -> int:
    """Return the token slots, in whole pages, that fit a worker's share of the memory.

    The bytes for pages are

        min(utilization * total - own, free) - slab - ROW_BYTES * logits - RESERVE

    Args:
        utilization: share of the whole device that this worker may allocate.
        slab: bytes that the slab for KV transfers will allocate.
        logits: number of logits of a step, batch slots times vocabulary size.

    Raises:
        SettingsError: the memory does not hold a single page.
    """
    allowed = int(utilization * memory.total) - memory.own
    other = RESERVE + ROW_BYTES * logits
    left = min(allowed, memory.free) - slab - other
    page = page_size * bytes_per_token
    if left < page:
        raise SettingsError(
            f"no memory is left for KV, {_gib(page - left)} are missing: this worker may use "
            f"{utilization:g} (gpu_memory_utilization) of {_gib(memory.total)}, has allocated "
            f"{_gib(memory.own)}, and needs {_gib(slab)} for transfers and {_gib(other)} for "
            f"graphs and activations; {_gib(memory.free)} are free. Raise "
            "gpu_memory_utilization, or reduce slots, slot_bytes or max_running"
        )
    return min(left // page * page_size, MAX_KV_TOKENS)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
