"""The sizes of a worker's KV page pools.

A compressed KV format has two kinds of pages. Sequences occupy stored pages, except for their first
page and the window of recent tokens. Exact pages are needed for these, and for prompts until they
are complete. A worker gets as many exact pages as its batch needs in addition to one prompt
(`PagePlan.batch`), but at most half of the memory. The prompt has the maximum length, or at most
`PREEMPTED_TOKENS` on a worker that receives the KV of prompts. A prefill worker, which keeps
prompts until they are read, gets half. The rest is for stored pages.

The number of long sequences that a worker holds therefore grows with the compression ratio if its
batch is not much larger: windows of unused batch slots are not available for stored pages.
"""

from dataclasses import dataclass
from typing import Self

import torch

from runtime.kv.cache import CacheLayout
from runtime.pages.plan import PageCount
from services.common.errors import SettingsError
from services.worker.settings import MAX_KV_TOKENS

CPU_TOKENS = 16_384
"""Default token slots on the CPU, whose memory other processes need as well."""
PREEMPTED_TOKENS = 8192
"""Tokens of the prompt for which a decode worker has exact pages. It computes a prompt only after
preemption. A longer one waits for pages of ended sequences; if it needs more than all exact pages,
the worker refuses the request, and the gateway continues it elsewhere."""
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


def pages_of_tokens(tokens: int, layout: CacheLayout, exact: int) -> PageCount:
    """Return the pages for ``tokens`` token slots, of stored pages with a compressed format.

    Args:
        exact: number of exact pages of a compressed format, if they are not more than the stored
            ones.
    """
    pages = tokens // layout.page_size
    return PageCount(min(exact, pages), pages) if layout.has_stored else PageCount(pages)


def pages_of_bytes(size: int, layout: CacheLayout, exact: int) -> PageCount:
    """Return the pages that fit into ``size`` bytes, at least `least_bytes`.

    Args:
        exact: number of exact pages of a compressed format, if they take at most half of the bytes.
    """
    most = MAX_KV_TOKENS // layout.page_size
    page = layout.page_size * layout.bytes_per_token
    if not layout.has_stored:
        return PageCount(min(size // page, most))
    exact = min(exact, size // 2 // page)
    stored = layout.page_size * layout.stored_bytes_per_token
    return PageCount(exact, min((size - exact * page) // stored, most))


def least_bytes(layout: CacheLayout) -> int:
    """Return the bytes at which `pages_of_bytes` has a page of each kind."""
    exact = layout.page_size * layout.bytes_per_token
    stored = layout.page_size * layout.stored_bytes_per_token
    return 2 * exact + stored if stored else exact


def kv_bytes_for(
    memory: DeviceMemory, *, utilization: float, slab: int, logits: int, least: int
) -> int:
    """Return the bytes for KV pages in a worker's share of the memory.

    These are

        min(utilization * total - own, free) - slab - ROW_BYTES * logits - RESERVE

    Args:
        utilization: share of the whole device that this worker may allocate.
        slab: bytes that the slab for KV transfers will allocate.
        logits: number of logits of a step, batch slots times vocabulary size.
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
            "gpu_memory_utilization, or reduce slots, slot_bytes or max_running"
        )
    return left


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
