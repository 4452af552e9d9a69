"""Decode steps of models that the megakernel does not support."""

import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.megakernel.decode_step import decode_step, unsupported_by_megakernel
from runtime.pages.plan import PageCount
from tests.runtime.tiny import tiny_model


def test_step_without_packed_weights_is_the_forward_pass() -> None:
    model = tiny_model()
    assert "packed weights" in str(unsupported_by_megakernel(model))
    cache, expected = (model.new_cache(PageCount(2)) for _ in range(2))
    batch = Batch.of([SequenceSlice([3], 0, [1]), SequenceSlice([5], 0, [0])])
    step = decode_step(model, batch, cache)
    logits = model.forward(batch, expected)
    for _ in range(2):  # every call reads the batch again
        assert torch.equal(step(), logits)
    for plane, other in zip(cache.planes, expected.planes, strict=True):
        assert torch.equal(plane, other)
