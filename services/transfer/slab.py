"""A registered memory region of equal slots, and the bookkeeping of their use.

KV is copied twice on its way, besides the transfer itself. The sender encodes pages into a slot of
its slab; the reader READs the slot into a landing slot and decodes that into pages. Pages are not
registered with NIXL, for three reasons. A segment is one contiguous range and one READ, although
its pages are scattered over all layers. The length of encoded KV is unknown before its encode. And
only verified KV is written to pages: a READ from a stopped peer may write long after it was given
up, but only to a landing slot, and that slot is quarantined until the READ has ended. With
SplitZip, the codec makes both copies in any case.
"""

from collections import deque
from dataclasses import dataclass

import torch

from services.transfer.errors import SlabError, SlotError

_ALIGNMENT = 4096
_SLOT_ALIGNMENT = 16


class Slab:
    """One contiguous buffer, aligned to 4 KiB, that is registered once.

    Peers may read all of it, so it is zeroed to hide earlier contents of the memory.

    Args:
        slots: number of slots.
        slot_bytes: bytes of a slot, a multiple of 16 so that a frame's payload stays aligned.
        device: a torch device.

    Attributes:
        buffer: all slots, ``[nbytes]`` uint8.

    Raises:
        SlabError: the sizes are not positive, or a slot is not a multiple of 16 bytes.
    """

    def __init__(self, slots: int, slot_bytes: int, device: str = "cpu") -> None:
        if slots < 1 or slot_bytes < 1 or slot_bytes % _SLOT_ALIGNMENT:
            raise SlabError(
                f"{slots} slots of {slot_bytes} bytes: both must be positive, "
                f"and a slot a multiple of {_SLOT_ALIGNMENT} bytes"
            )
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.nbytes = slots * slot_bytes
        # `zeros` would leave the memory unmapped, and first uses of slots would cause page faults.
        padded = torch.empty(self.nbytes + _ALIGNMENT, dtype=torch.uint8, device=device).zero_()
        start = -padded.data_ptr() % _ALIGNMENT
        self.buffer = padded[start : start + self.nbytes]

    @property
    def address(self) -> int:
        """Address of the first byte; slot i starts ``i * slot_bytes`` after it."""
        return self.buffer.data_ptr()

    @property
    def memory_kind(self) -> str:
        """NIXL's name of the memory: "DRAM" or "VRAM"."""
        return "VRAM" if self.buffer.is_cuda else "DRAM"

    @property
    def device_index(self) -> int:
        """Index of the GPU; 0 for host memory."""
        return max(self.buffer.get_device(), 0)

    def view(self, slot: int, length: int) -> torch.Tensor:
        """Return the first ``length`` bytes of a slot, ``[length]`` uint8, without copying.

        Raises:
            SlabError: the slot does not exist, or ``length`` exceeds its size.
        """
        if not 0 <= slot < self.slots:
            raise SlabError(f"slot {slot} does not exist; the slab has {self.slots}")
        if not 0 <= length <= self.slot_bytes:
            raise SlabError(f"{length} bytes do not fit a slot of {self.slot_bytes}")
        start = slot * self.slot_bytes
        return self.buffer[start : start + length]


@dataclass(frozen=True)
class SlotRef:
    """One use of a slot. ``generation`` counts the uses of this slot, from 1."""

    slot: int
    generation: int


class SlotPool:
    """Free and held slots. Pure bookkeeping; not thread-safe.

    The slot that has been free the longest is used first, so a late access most likely hits a free
    slot.

    Args:
        slots: numbers of the slots in their slab.
    """

    def __init__(self, slots: range) -> None:
        self._free = deque(slots)
        self._generations = dict.fromkeys(slots, 0)
        self._held: dict[int, SlotRef] = {}

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Number of held slots."""
        return len(self._held)

    def acquire(self) -> SlotRef:
        """Return a free slot with its next generation. Raises SlotError if no slot is free."""
        if not self._free:
            raise SlotError("no slot is free")
        slot = self._free.popleft()
        self._generations[slot] += 1
        ref = SlotRef(slot, self._generations[slot])
        self._held[slot] = ref
        return ref

    def release(self, ref: SlotRef) -> None:
        """Free a held slot. Raises SlotError unless ``ref`` is held."""
        if self._held.get(ref.slot) != ref:
            raise SlotError(f"slot {ref.slot}, generation {ref.generation}, is not held")
        del self._held[ref.slot]
        self._free.append(ref.slot)
