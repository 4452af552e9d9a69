"""How many tokens of KV a worker has room for."""

from dataclasses import dataclass
from typing import Self

import torch

from services.common.errors import SettingsError
from services.worker.settings import MOST_KV_TOKENS

CPU_TOKENS = 16_384
"""On the CPU, whose memory is shared with everything else on the machine."""
RESERVE = 5 << 28
"""Bytes, 1.25 GiB, for CUDA's context, graphs and what a step computes in."""
ROW_BYTES = 60
"""For each row of a decode batch and entry of the vocabulary: tables of sampling, and what it
computes in."""
_GIB = 1 << 30


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device, once a worker's weights are on it.

    Attributes:
        total: there are.
        free: nobody has, no other process either.
        own: this worker has taken.
    """

    total: int
    free: int
    own: int

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """Of a GPU, after what was only needed for loading has been given back."""
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
    """Tokens, whole pages of them, that fill what a worker may still take.

    It may have ``utilization`` of the whole device, whoever else is on it, of what is free:

        min(utilization * total - own, free) - slab - ROW_BYTES * logits - RESERVE

    Args:
        slab: bytes that this worker will take for transfers.
        logits: of a decode step, rows times vocabulary; 0 where nothing is decoded.

    Raises:
        SettingsError: not one page fits.
    """
    allowed = int(utilization * memory.total) - memory.own
    other = RESERVE + ROW_BYTES * logits
    left = min(allowed, memory.free) - slab - other
    page = page_size * bytes_per_token
    if left < page:
        raise SettingsError(
            f"no memory is left for KV, {_gib(page - left)} are missing: of "
            f"{_gib(memory.total)} this worker may take {utilization:g} "
            f"(gpu_memory_utilization), has {_gib(memory.own)} already, and needs {_gib(slab)} for "
            f"transfers and {_gib(other)} for graphs and the like; {_gib(memory.free)} are free"
        )
    return min(left // page * page_size, MOST_KV_TOKENS)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
