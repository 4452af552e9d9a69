"""Sizes of a worker: given ones, and those chosen for the device and the role."""

from typing import Any

import pytest
import torch

from runtime.core.limits import Limits
from runtime.kv.cache import CacheLayout
from runtime.kv.format import Plane
from services.decode.settings import DecodeSettings
from services.prefill.settings import PrefillSettings
from services.transfer.codecs import SegmentCodecs
from services.transfer.manifest import plan_segments
from services.worker.settings import WorkerSettings
from services.worker.sizes import WorkerSizes

GIB = 1 << 30


@pytest.fixture
def codecs() -> SegmentCodecs:
    """The KV of Llama-3-8B: 128 KiB a token."""
    planes = tuple(Plane(name, torch.bfloat16, (8, 16, 128)) for name in ("k", "v"))
    return SegmentCodecs(CacheLayout(16, 8, (planes,) * 32), {})


def sizes(codecs: SegmentCodecs, gpu: int, *, decodes: bool, **given: Any) -> WorkerSizes:
    settings: type[WorkerSettings] = DecodeSettings if decodes else PrefillSettings
    return WorkerSizes.of(settings.model_validate(given), codecs, gpu_bytes=gpu)


@pytest.mark.parametrize("decodes", [False, True])
def test_cpu_sizes_do_not_depend_on_the_role(codecs: SegmentCodecs, decodes: bool) -> None:
    chosen = sizes(codecs, 0, decodes=decodes)
    limits = Limits(64, 256, 512, 512)
    assert chosen == WorkerSizes(limits, slots=16, slot_bytes=4 << 20, history_slots=4)
    assert (chosen.of_prompts, chosen.of_history) == (range(16), range(16, 20))


def test_chunks_of_all_roles_are_equal_on_a_gpu(codecs: SegmentCodecs) -> None:
    prefill = sizes(codecs, 140 * GIB, decodes=False).limits
    decode = sizes(codecs, 140 * GIB, decodes=True).limits
    assert prefill.chunk_tokens == decode.chunk_tokens == 1024
    assert prefill.step_tokens == decode.step_tokens == 1024
    assert (prefill.max_running, decode.max_running) == (64, 256)


def test_slot_of_a_large_gpu_holds_256_mib_of_any_kv(codecs: SegmentCodecs) -> None:
    chosen = sizes(codecs, 140 * GIB, decodes=True)
    segments = plan_segments(
        codecs.layout,
        first_token=0,
        num_tokens=2048,
        page_tables=(tuple(range(128)),),
        capacity=chosen.slot_bytes,
        bound=codecs.max_frame_bytes,
    )
    assert len(list(segments)) == 1
    assert chosen.slot_bytes < 270 << 20


@pytest.mark.parametrize("gib", [16, 24, 80])
def test_slab_uses_a_small_share_of_the_gpu(codecs: SegmentCodecs, gib: int) -> None:
    chosen = sizes(codecs, gib * GIB, decodes=True)
    assert chosen.slots * chosen.slot_bytes < 0.032 * gib * GIB
    assert chosen.slab_bytes < 0.04 * gib * GIB


def test_slot_holds_a_page_of_a_layer_on_any_gpu(codecs: SegmentCodecs) -> None:
    assert sizes(codecs, 1 << 20, decodes=True).slot_bytes >= codecs.min_slot_bytes


@pytest.mark.parametrize(
    "given", [{"prefix_cache": False}, {"kv_eviction": 0.5}, {"read_history": False}]
)
def test_slab_has_no_slots_for_history_that_is_not_read(
    codecs: SegmentCodecs, given: dict[str, Any]
) -> None:
    assert sizes(codecs, 0, decodes=False, **given).slab_slots == 16


def test_given_sizes_are_kept(codecs: SegmentCodecs) -> None:
    given = {"max_running": 5, "step_tokens": 96, "slot_bytes": 1 << 20, "slots": 3}
    chosen = sizes(codecs, 140 * GIB, decodes=True, **given)
    assert chosen == WorkerSizes(
        Limits(5, 256, 96, 96), slots=3, slot_bytes=1 << 20, history_slots=2
    )
    assert sizes(codecs, 0, decodes=True, step_tokens=100).limits.chunk_tokens == 96
    assert sizes(codecs, 0, decodes=True, chunk_tokens=64).limits.chunk_tokens == 64
