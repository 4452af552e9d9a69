"""Decode steps before their first launch, and of models that the megakernel does not support."""

from typing import cast

import pytest
import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint.slices import rank_checkpoint
from runtime.gemm.weights import PackedWeights
from runtime.layers.rope import cos_sin_table
from runtime.megakernel import schedule
from runtime.megakernel.decode_step import decode_step, unsupported_by_megakernel
from runtime.megakernel.kernels import opcodes
from runtime.megakernel.launch import DecodeStep
from runtime.pages.plan import PageCount
from runtime.parallel.partition import Partition, Scheme
from runtime.parallel.peer_memory import PeerMemory, PeerTensor
from tests.runtime.tiny import CONFIG, tiny_checkpoint, tiny_model

CPU_LINE_BYTES = 64
"""Alignment of tensors on the CPU; on a GPU it is a multiple of a line."""


class OwnMemory:
    """Peer memory of rank 1, without the other ranks."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 1, size

    def zeros(self, *shape: int, dtype: torch.dtype) -> PeerTensor:
        return PeerTensor(torch.zeros(shape, dtype=dtype), torch.zeros(self.size, dtype=torch.long))


@pytest.mark.parametrize("pairs", [(None,) * 7, (9, None, 8, None, 17, None, 24)], ids=str)
@pytest.mark.parametrize(
    ("ranks", "scheme"), [(1, Scheme.LOW_RANK), (2, Scheme.LOW_RANK), (2, Scheme.EVEN)]
)
@pytest.mark.parametrize("attended", [False, True])
def test_step_is_built(
    pairs: tuple[int | None, ...],
    ranks: int,
    scheme: Scheme,
    attended: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "LINE_BYTES", CPU_LINE_BYTES)
    part = Partition.of(CONFIG, ranks - 1, ranks, scheme)
    weights = PackedWeights.pack(rank_checkpoint(tiny_checkpoint(ranks=pairs), part), "cpu")
    shape = 3, part.kv_heads.stop - part.kv_heads.start, 16, CONFIG.head_dim
    planes = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2 * CONFIG.num_layers)]
    step = DecodeStep(
        weights,
        planes,
        cos_sin_table(CONFIG, CONFIG.context_length),
        Batch.static(3, 1, torch.device("cpu")),
        attend=[lambda queries: queries.flatten(1)] * CONFIG.num_layers if attended else (),
        memory=cast(PeerMemory, OwnMemory(ranks)) if ranks > 1 else None,
        first_token=part.tokens.start,
        programs=132,
    )
    assert step.logits.shape == (3, part.tokens.stop - part.tokens.start)
    assert len(step._schedules) == (CONFIG.num_layers + 1 if attended else 1)
    rows = [row for each in step._schedules for row in each.table[: each.passes].tolist()]
    matrices = [each for layer in weights.layers for each in layer.matrices] + [weights.lm_head]
    addresses = {matrix.weight.data_ptr() for matrix in matrices}
    found = {
        weights.lm_head.weight.data_ptr() + CPU_LINE_BYTES * row[opcodes.OFFSET.value]
        for row in rows
        if row[opcodes.WIDTH.value]
    }
    assert found == addresses


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
