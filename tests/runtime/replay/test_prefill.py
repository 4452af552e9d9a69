"""Padded prefill batches give the same results as batches without padding, on the CPU."""

import pytest
import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.models.model import Model
from runtime.replay.prefill import PrefillReplay
from tests.runtime.attention.samples import pages_of
from tests.runtime.tiny import tiny_checkpoint

PAGES = 40


@pytest.mark.parametrize(
    "pieces",
    [
        # (first position, number of tokens, want_logits)
        [(0, 16, True)],
        [(0, 1, True)],
        [(32, 17, False)],
        [(0, 37, True), (16, 5, False), (48, 1, True)],
        [(0, 3, True)] * 8,
        [(16, 70, True), (0, 58, True)],
    ],
    ids=str,
)
def test_padded_batch_gives_the_same_logits_and_pages(
    pieces: list[tuple[int, int, bool]],
) -> None:
    model = Model(tiny_checkpoint(bias=True))
    cache, expected = model.new_cache(PAGES + 1), model.new_cache(PAGES + 1)
    for plane, other in zip(cache.planes, expected.planes, strict=True):
        other.copy_(plane.normal_())
    replay = PrefillReplay(model, cache, 128)
    pages = pages_of([first + count for first, count, _ in pieces])
    batch = [
        SequenceSlice([7 * n % 211 for n in range(count)], first, own, logits)
        for (first, count, logits), own in zip(pieces, pages, strict=True)
    ]
    replay.forward(
        [SequenceSlice([5] * 100, 0, list(range(7)))]
    )  # leaves stale values in the static tensors
    for plane, other in zip(cache.planes, expected.planes, strict=True):
        other.copy_(plane)
    logits = replay.forward(batch)
    assert logits is not None
    assert torch.equal(logits, model.forward(Batch.of(batch), expected))
    for plane, other in zip(cache.planes, expected.planes, strict=True):
        assert torch.equal(plane[:PAGES], other[:PAGES])


def test_too_large_batch_is_not_replayed() -> None:
    model = Model(tiny_checkpoint())
    replay = PrefillReplay(model, model.new_cache(PAGES), 64)
    assert replay.forward([SequenceSlice([1] * 65, 0, list(range(5)))]) is None
    assert replay.forward([SequenceSlice([1], 0, [n]) for n in range(9)]) is None
    assert replay.forward([SequenceSlice([1] * 64, 0, list(range(4)))]) is not None


def test_warm_up_reports_every_size_and_writes_only_the_null_page() -> None:
    model = Model(tiny_checkpoint())
    cache = model.new_cache(3)
    for plane in cache.planes:
        plane.fill_(7)
    progress: list[int] = []
    PrefillReplay(model, cache, 100).warm_up(progress.append)
    assert progress == [100, 64, 32, 16]
    for plane in cache.planes:
        assert (plane[:2] == 7).all()
