"""The layout of a slab, and a stateful (model-based) test of the slot pool."""

import pytest
import torch
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.transfer.errors import SlabError, SlotError
from services.transfer.slab import Slab, SlotPool, SlotRef


@pytest.mark.parametrize(("slots", "slot_bytes"), [(1, 16), (3, 4096), (17, 1008)])
def test_slots_tile_an_aligned_zeroed_buffer(slots: int, slot_bytes: int) -> None:
    slab = Slab(slots, slot_bytes)
    assert slab.address % 4096 == 0
    assert slab.nbytes == slots * slot_bytes
    assert (slab.memory_kind, slab.device_index) == ("DRAM", 0)
    for slot in range(slots):
        view = slab.view(slot, slot_bytes)
        assert view.data_ptr() == slab.address + slot * slot_bytes
        assert view.dtype == torch.uint8
        assert view.shape == (slot_bytes,)
        assert not view.any()
        view.fill_(slot + 1)
    for slot in range(slots):
        assert (slab.view(slot, slot_bytes) == slot + 1).all()


@pytest.mark.parametrize(
    ("slots", "slot_bytes"), [(0, 4096), (-1, 4096), (4, 0), (4, 17), (4, -16)]
)
def test_invalid_slab_sizes_are_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(SlabError):
        Slab(slots, slot_bytes)


@pytest.mark.parametrize(("slot", "length"), [(-1, 1), (4, 1), (0, -1), (0, 33)])
def test_views_stay_inside_their_slot(slot: int, length: int) -> None:
    with pytest.raises(SlabError):
        Slab(4, 32).view(slot, length)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_slab_on_a_gpu_is_vram() -> None:
    slab = Slab(2, 4096, "cuda")
    assert slab.memory_kind == "VRAM"
    assert slab.address % 4096 == 0


def test_slot_free_the_longest_is_acquired_first() -> None:
    pool = SlotPool(range(3))
    first, second = pool.acquire(), pool.acquire()
    pool.release(second)
    pool.release(first)
    order = [pool.acquire(), pool.acquire(), pool.acquire()]
    assert order == [SlotRef(2, 1), SlotRef(1, 2), SlotRef(0, 2)]


class PoolMachine(RuleBasedStateMachine):
    """Random calls: counts add up, generations rise by one, stale references are refused."""

    SLOTS = 5
    held = Bundle("held")
    stale = Bundle("stale")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(range(self.SLOTS))
        self.uses = [0] * self.SLOTS
        self.in_use: set[SlotRef] = set()

    @rule(target=held)
    def acquire(self) -> SlotRef | None:
        if len(self.in_use) == self.SLOTS:
            with pytest.raises(SlotError):
                self.pool.acquire()
            return None
        ref = self.pool.acquire()
        self.uses[ref.slot] += 1
        assert ref.generation == self.uses[ref.slot]
        assert ref.slot not in {other.slot for other in self.in_use}
        self.in_use.add(ref)
        return ref

    @rule(target=stale, ref=consumes(held))
    def release(self, ref: SlotRef | None) -> SlotRef:
        if ref is None:
            return SlotRef(0, 0)
        self.pool.release(ref)
        self.in_use.remove(ref)
        return ref

    @rule(ref=stale)
    def misuse(self, ref: SlotRef) -> None:
        with pytest.raises(SlotError):
            self.pool.release(ref)

    @invariant()
    def counts_add_up(self) -> None:
        pool = self.pool
        assert pool.in_use == len(self.in_use)
        assert pool.free + pool.in_use == self.SLOTS


TestPool = PoolMachine.TestCase
