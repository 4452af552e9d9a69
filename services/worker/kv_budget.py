"""The memory of a worker's KV page pools.

Page groups that hold sinks and windows (`runtime.pages.sizes`) need a bounded number of pages: the
windows of a full batch, and all pages of one prompt until it is complete. They get that many, but
at most half of the memory. The prompt is assumed to have the maximum length; on a worker that only
receives KV, at most `PREEMPTED_TOKENS`. A prefill worker keeps many prompts until they are read, so
these groups get half of its memory. The other groups get the rest.

Windows are reserved for every batch slot, used or not. With a compressed KV format, a worker
therefore holds more long sequences in proportion to the compression ratio only if ``max_running``
is not much larger than the number of long sequences that fit.
"""

from dataclasses import dataclass
from typing import Self

import torch

from services.common.errors import SettingsError

CPU_TOKENS = 16_384
"""Default token slots on the CPU, whose memory other processes need as well."""
PREEMPTED_TOKENS = 8192
"""Number of prompt tokens for which a decode worker has pages in groups with a window.

It computes a prompt only after preemption. A longer one waits for pages of ended sequences; if it
needs more than all of these pages, the worker refuses the request, and the gateway continues it
elsewhere.
"""
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


def kv_bytes_for(
    memory: DeviceMemory, *, utilization: float, slab: int, logits: int, least: int
) -> int:
    """Return the bytes for KV pages in a worker's share of the memory.

    These are

        min(utilization * total - own, free) - slab - ROW_BYTES * logits - RESERVE

    where total, own and free are fields of ``memory``.

    Args:
        utilization: share of the whole device that this worker may allocate.
        slab: bytes that the slab for KV transfers will allocate.
        logits: number of logits of a step: batch slots times the rank's rows of the vocabulary.
        least: bytes of the smallest page pools.

    Raises:
        SettingsError: fewer than ``least`` bytes are left.
    """
    allowed = int(utilization * memory.total) - memory.own
    other = RESERVE + ROW_BYTES * logits
    left = min(allowed, memory.free) - slab - other
    if left < least:
        raise SettingsError(
            f"not enough GPU memory for KV, {_gib(least - left)} short: this worker may use "
            f"{utilization:g} (gpu_memory_utilization) of {_gib(memory.total)}, has allocated "
            f"{_gib(memory.own)}, and needs {_gib(slab)} for transfers and {_gib(other)} for "
            f"graphs and activations; {_gib(memory.free)} are free. Raise "
            "gpu_memory_utilization, reduce slots, slot_bytes or max_running, or divide the model "
            "among more GPUs (--tp)"
        )
    return left


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
