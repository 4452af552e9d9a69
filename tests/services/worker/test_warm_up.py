"""Warm-up of the codec, on the CPU."""

from dataclasses import replace

import pytest
import torch

import codec
from services.transfer.policy import WireMode
from services.transfer.slab import Slab
from services.worker.codec_warm_up import warm_up_codec
from tests.runtime.tiny import CONFIG
from tests.services.workers import CHUNK, SLOT_BYTES, load


@pytest.mark.parametrize(
    ("codebooks", "slot_bytes", "kinds"),
    [(False, 6000, 2), (True, 6000, 2), (True, SLOT_BYTES, 1)],
)
def test_warm_up_covers_all_kinds_of_segments_and_keeps_the_pages(
    codebooks: bool, slot_bytes: int, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(codebooks=codebooks)
    loaded = replace(loaded, sizes=replace(loaded.sizes, chunk_tokens=CHUNK))
    planes = loaded.engine.cache.planes
    for plane in planes:
        plane.normal_()
    kept = [plane.clone() for plane in planes]
    made: list[tuple[int, bool]] = []
    paged = codec.paged

    def watched(planes: list[torch.Tensor], books: list[codec.Codebook | None]) -> codec.PagedCodec:
        made.append((len(planes), any(books)))
        return paged(planes, books)

    monkeypatch.setattr(codec, "paged", watched)
    assert warm_up_codec(loaded, Slab(1, slot_bytes)) == kinds
    assert len(made) == kinds * (len(WireMode) if codebooks else 1)
    assert max(count for count, _ in made) == 2 * CONFIG.num_layers
    assert any(coded for _, coded in made) is codebooks
    assert all(torch.equal(plane, was) for plane, was in zip(planes, kept, strict=True))
