"""The megakernel on several GPUs, compared with the whole model on each of them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint.slices import rank_checkpoint
from runtime.config import ModelConfig
from runtime.gemm.weights import PackedWeights
from runtime.layers.rope import cos_sin_table
from runtime.megakernel.launch import DecodeStep
from runtime.models.build import build_model
from runtime.offline.bench.ranks import Collectives, over_ranks
from runtime.pages.plan import PageCount
from runtime.parallel.group import RankGroup
from runtime.parallel.partition import Partition, Scheme
from tests.runtime.attention.samples import pages_of
from tests.runtime.megakernel.test_kernels import LARGE
from tests.runtime.tiny import CONFIG, tiny_checkpoint

pytestmark = pytest.mark.gpu

UNEVEN = replace(CONFIG, num_heads=9, num_kv_heads=3)
WIDE = replace(LARGE, num_kv_heads=4)
Pairs = tuple[int | None, ...]
DENSE: Pairs = (None,) * 7
PAIRS: Pairs = (9, 5, 8, 12, 17, 11, 24)
MIXED: Pairs = (9, None, 8, None, 17, None, 24)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("config", "pairs"),
    [(CONFIG, DENSE), (UNEVEN, PAIRS), (UNEVEN, MIXED), (WIDE, DENSE), (WIDE, PAIRS)],
    ids=["even, dense", "uneven, pairs", "uneven, mixed", "wide, dense", "wide, pairs"],
)
@pytest.mark.parametrize("positions", [(0,), (130, 1, 63)], ids=str)
@pytest.mark.parametrize("scheme", [Scheme.LOW_RANK, Scheme.EVEN])
def test_steps_match_the_model(
    size: int, config: ModelConfig, pairs: Pairs, positions: tuple[int, ...], scheme: Scheme
) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    work = partial(check, config, pairs, positions, scheme)
    assert len(list(over_ranks(size, "cuda", work, Collectives.PUSH))) == 4


def check(
    config: ModelConfig,
    pairs: Pairs,
    positions: tuple[int, ...],
    scheme: Scheme,
    group: RankGroup,
) -> Iterator[float]:
    """Compare steps of a rank, one of them captured, with the whole model; yield the errors."""
    device = torch.device("cuda", group.rank)
    checkpoint = tiny_checkpoint(ranks=pairs, bias="all", config=config)
    model = build_model(checkpoint, device=device, dtype=torch.float32)
    pages = pages_of([position + 1 for position in positions])
    cache = model.new_cache(PageCount(sum(map(len, pages)) + 1))
    texts = [
        [(7 * number + 3 * at) % config.vocab_size for at in range(position + 1)]
        for number, position in enumerate(positions)
    ]
    before = [
        SequenceSlice(text[:-1], 0, own, want_logits=False)
        for text, own in zip(texts, pages, strict=True)
        if len(text) > 1
    ]
    if before:
        model.forward(Batch.of(before, device), cache)
    part = Partition.of(config, group.rank, group.size, scheme)
    heads = slice(part.kv_heads.start, part.kv_heads.stop)
    cos, sin = cos_sin_table(config, config.context_length)
    step = DecodeStep(
        PackedWeights.pack(rank_checkpoint(checkpoint, part), device),
        [plane[:, heads].contiguous() for plane in cache.planes],
        (cos.to(device), sin.to(device)),
        Batch.static(len(positions), max(map(len, pages)), device),
        memory=group.memory,
        first_token=part.tokens.start,
        programs=torch.cuda.get_device_properties(device).multi_processor_count,
    )
    step.batch.tokens.copy_(torch.tensor([text[-1] for text in texts]))
    step.batch.positions.copy_(torch.tensor(positions))
    step.batch.lengths.copy_(torch.tensor(positions) + 1)
    for row, own in enumerate(pages):
        step.batch.page_table[row, : len(own)] = torch.tensor(own)
    last = [
        SequenceSlice(text[-1:], len(text) - 1, own) for text, own in zip(texts, pages, strict=True)
    ]
    expected = model.forward(Batch.of(last, device), cache)[:, part.tokens.start : part.tokens.stop]
    graph = torch.cuda.CUDAGraph()
    for launch in range(4):
        if launch < 2:
            step.launch()
        elif launch == 2:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                step.launch()
        if launch >= 2:
            graph.replay()
        error = float((step.logits - expected).abs().max() / expected.abs().max())
        assert error < 0.01  # the megakernel computes in bf16, the model in fp32
        yield error
