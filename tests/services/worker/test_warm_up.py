"""Warm-up of the codec, on the CPU."""

import pytest
import torch

import codec
from services.transfer.policy import WireMode
from services.worker.warm_up import warm_up_codec
from tests.runtime.tiny import CONFIG
from tests.services.workers import CHUNK, SLOT_BYTES, load


@pytest.mark.parametrize(
    ("codebooks", "tokens", "slot_bytes", "segments"),
    [
        (False, CHUNK, 6000, 2),
        (True, CHUNK, 6000, 2),
        (True, CHUNK, SLOT_BYTES, 1),
        (True, 1, 6000, 1),
    ],
)
def test_warm_up_covers_all_segments_and_keeps_the_pages(
    codebooks: bool, tokens: int, slot_bytes: int, segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(codebooks=codebooks)
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
    sent = warm_up_codec(loaded.engine, loaded.codebooks, tokens, slot_bytes)
    assert sent == segments
    assert len(made) == segments * (len(WireMode) if codebooks else 1)
    assert sum(count for count, coded in made if coded is codebooks) == 2 * CONFIG.num_layers
    assert all(torch.equal(plane, was) for plane, was in zip(planes, kept, strict=True))
