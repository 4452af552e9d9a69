"""Sizes of a worker: batches, prompt chunks and the slab of KV transfers."""

from dataclasses import dataclass
from typing import Literal, Self

from runtime.core.limits import Limits
from services.transfer.codecs import SegmentCodecs
from services.worker.settings import WorkerSettings

_SEGMENT_BYTES = 256 << 20
"""KV bytes of a segment on a GPU. The hosts were measured to take 0.7 ms for a segment, in which
NVLink moves some 270 MB (H200)."""
_SLOTS_PER_HISTORY_SLOT = 4
"""Number of slots for prompts for each slot for history."""
_LEAST_HISTORY_SLOTS = 2
_SLAB_SHARE = 0.03
"""Maximum share of a GPU's memory that the slots for prompts may use."""


@dataclass(frozen=True)
class WorkerSizes:
    """Sizes from the settings or, where those are "auto", chosen for the device and the role.

    Attributes:
        limits: limits of the engine.
        slots: number of slots of the slab for KV of prompts.
        slot_bytes: bytes of a slot.
        history_slots: number of slots that follow them in the slab, for KV that prefill workers
            read from decode workers; 0 if this worker does not take part.
    """

    limits: Limits
    slots: int
    slot_bytes: int
    history_slots: int = 0

    @property
    def slab_slots(self) -> int:
        """Number of slots of the slab."""
        return self.slots + self.history_slots

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slab."""
        return self.slab_slots * self.slot_bytes

    @property
    def of_prompts(self) -> range:
        """Slots for KV of prompts."""
        return range(self.slots)

    @property
    def of_history(self) -> range:
        """Slots for KV that prefill workers read from decode workers."""
        return range(self.slots, self.slab_slots)

    @classmethod
    def of(cls, settings: WorkerSettings, codecs: SegmentCodecs, *, gpu_bytes: int) -> Self:
        """Return the sizes for a worker.

        Running sequences wait for each step, but a larger step computes more tokens per second. On
        an H200, an 8B model takes 14 ms for 448 prompt tokens beside 64 running sequences, and 24
        ms for 960; 512 and 1,024 rows fill the tiles of matrix products. Chunks have the same size
        for all roles: another size changes the rounding of results.

        Args:
            gpu_bytes: memory of the GPU; 0 on a CPU.
        """
        running = 64
        step = 512
        slot = 4 << 20
        if gpu_bytes:
            slot = _slot_bytes(codecs, settings.slots, gpu_bytes)
            running = settings.gpu_batch
            step = 1024
        step = _given(settings.step_tokens, step)
        limits = Limits(
            max_running=_given(settings.max_running, running),
            max_waiting=settings.max_waiting,
            step_tokens=step,
            chunk_tokens=_given(settings.chunk_tokens, min(step, 1024) // 16 * 16),
        )
        return cls(
            limits,
            settings.slots,
            slot_bytes=_given(settings.slot_bytes, slot),
            history_slots=_history_slots(settings, codecs),
        )


def _history_slots(settings: WorkerSettings, codecs: SegmentCodecs) -> int:
    """Return the number of slots for history; one worker may hold three quarters of them.

    A prefill attends to the KV as it was computed. If pages are encoded, decode workers do not have
    this KV; if tokens are evicted, its tokens are in other pages.
    """
    is_shared = settings.prefix_cache and not settings.kv_eviction
    if not settings.exchanges_history or not is_shared or codecs.layout.plan.encodes:
        return 0
    return max(_LEAST_HISTORY_SLOTS, settings.slots // _SLOTS_PER_HISTORY_SLOT)


def _given(setting: int | Literal["auto"], chosen: int) -> int:
    return chosen if setting == "auto" else setting


def _slot_bytes(codecs: SegmentCodecs, slots: int, gpu_bytes: int) -> int:
    """Return the bytes of the slots on a GPU: `_SEGMENT_BYTES` of KV with headers, if they fit."""
    segment = min(_SEGMENT_BYTES, int(_SLAB_SHARE * gpu_bytes) // slots)
    frame = segment + segment // 64 + (64 << 10)  # expansion of incompressible data, headers
    return max(-(-frame // 4096) * 4096, codecs.min_slot_bytes)
