"""The ranks of a worker evict the tokens that a worker of one rank evicts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.checkpoint.slices import rank_checkpoint
from runtime.engine import Add
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.tiny import CONFIG, drive, engine_of, executor_of, request_of, tiny_checkpoint

THREE_KV_HEADS = replace(CONFIG, num_heads=9, num_kv_heads=3)
CHECKPOINT = tiny_checkpoint(config=THREE_KV_HEADS)


def evicted(model: Model) -> list[Tensor]:
    """Return the planes after a prompt of several chunks, of which half of the tokens were evicted.

    Collectives of all ranks have the same shapes and order.
    """
    engine = engine_of(model, kv_eviction=0.5)
    record = drive(engine, Add(request_of("a", 200, 4)))
    assert [chunk.evicted for step in record.steps for chunk in step.computed][-1] > 0
    return executor_of(engine).cache.planes


@pytest.mark.parametrize(
    ("size", "scheme"), [(2, Scheme.LOW_RANK), (4, Scheme.LOW_RANK), (2, Scheme.BASE)]
)
def test_ranks_keep_the_tokens_of_one_rank(size: int, scheme: Scheme) -> None:
    """Some of four ranks have the same KV head, and different query heads of it."""
    expected = evicted(build_model(CHECKPOINT))

    def run(group: ThreadGroup) -> tuple[range, list[Tensor]]:
        partition = Partition.of(THREE_KV_HEADS, group.rank, size, scheme)
        model = build_model(rank_checkpoint(CHECKPOINT, partition), group=group)
        return model.config.kv_heads, evicted(model)

    first: dict[range, list[Tensor]] = {}
    for heads, planes in on_ranks(size, run):
        for mine, all_heads in zip(planes, expected, strict=True):
            own = all_heads[:, heads.start : heads.stop]
            # Ranks add their outputs in another order; KV is rounded to bf16.
            torch.testing.assert_close(mine.float(), own.float(), rtol=0.02, atol=0.02)
        for mine, copy in zip(planes, first.setdefault(heads, planes), strict=True):
            assert mine.equal(copy)
