"""Sizes of a worker: batches, prompt chunks and the slab of KV transfers."""

from dataclasses import dataclass
from typing import Literal, Self

from runtime.core.limits import Limits
from services.transfer.codecs import SegmentCodecs
from services.worker.settings import WorkerSettings

_SEGMENT_BYTES = 256 << 20
"""KV bytes of a segment on a GPU. The hosts were measured to take 0.7 ms for a segment, in which
NVLink moves some 270 MB (H200)."""
_SLAB_SHARE = 0.03
"""Maximum share of a GPU's memory that the slab may use."""


@dataclass(frozen=True)
class WorkerSizes:
    """Sizes from the settings or, where those are "auto", chosen for the device and the role.

    Attributes:
        limits: limits of the engine.
        slots: number of slots of the slab.
        slot_bytes: bytes of a slot.
    """

    limits: Limits
    slots: int
    slot_bytes: int

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slab."""
        return self.slots * self.slot_bytes

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
        return cls(limits, settings.slots, slot_bytes=_given(settings.slot_bytes, slot))


def _given(setting: int | Literal["auto"], chosen: int) -> int:
    return chosen if setting == "auto" else setting


def _slot_bytes(codecs: SegmentCodecs, slots: int, gpu_bytes: int) -> int:
    """Return the bytes of the slots on a GPU: `_SEGMENT_BYTES` of KV with headers, if they fit."""
    segment = min(_SEGMENT_BYTES, int(_SLAB_SHARE * gpu_bytes) // slots)
    frame = segment + segment // 64 + (64 << 10)  # expansion of incompressible data, headers
    return max(-(-frame // 4096) * 4096, codecs.min_slot_bytes)
