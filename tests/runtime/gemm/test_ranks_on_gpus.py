"""Layers over packed weights on several GPUs, compared with the whole model on each of them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint.slices import rank_checkpoint
from runtime.gemm.model import build_gemm_model
from runtime.models.build import build_model
from runtime.offline.bench.ranks import Collectives, over_ranks
from runtime.pages.plan import PageCount, pages_for
from runtime.parallel.group import RankGroup
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.tiny import CONFIG, prompt_of, tiny_checkpoint

pytestmark = pytest.mark.gpu

WIDE = replace(CONFIG, hidden_size=1000, intermediate_size=2048, num_heads=16, num_kv_heads=4)
PAIRS = (250, 70, 66, 256, 500, 512, 510)
MIXED = (250, None, 66, None, 500, 512, 510)
LENGTHS = (1, 7, 300)
"""Numbers of tokens whose sums are single kernels of one and of two steps. Ranks have parts of the
residual stream that differ in size."""


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("pairs", [PAIRS, MIXED], ids=["pairs", "mixed"])
@pytest.mark.parametrize("collectives", [Collectives.PUSH, Collectives.NCCL])
@pytest.mark.parametrize("scheme", [Scheme.LOW_RANK, Scheme.EVEN])
def test_logits_match_those_of_the_whole_model(
    size: int, pairs: tuple[int | None, ...], collectives: Collectives, scheme: Scheme
) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    errors = list(over_ranks(size, "cuda", partial(check, pairs, scheme), collectives))
    assert len(errors) == len(LENGTHS)


def check(pairs: tuple[int | None, ...], scheme: Scheme, group: RankGroup) -> Iterator[float]:
    """Compare the logits of prompts on a rank with those of the whole model; yield the errors."""
    own = torch.device("cuda", group.rank)
    checkpoint = tiny_checkpoint(ranks=pairs, bias="all", config=WIDE)
    whole = build_model(checkpoint, device=own, dtype=torch.float32)
    part = rank_checkpoint(checkpoint, Partition.of(WIDE, group.rank, group.size, scheme))
    model = build_gemm_model(part, device=own, group=group)
    for length in LENGTHS:
        pages = range(pages_for(length, model.page_size))
        tokens = prompt_of(length, vocab=WIDE.vocab_size)
        batch = Batch.of([SequenceSlice(tokens, 0, pages)], own)
        expected, found = (
            each.vocabulary.whole(each.forward(batch, each.new_cache(PageCount(len(pages)))))
            for each in (whole, model)
        )
        error = float((found - expected).abs().max() / expected.abs().max())
        assert error < 0.04  # the GEMM kernels compute in bf16, the model in fp32
        yield error
