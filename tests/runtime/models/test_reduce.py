"""Sums over ranks in a decoder layer; `test_two_ranks.py` runs them in two processes."""

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import Dense, FactorPair, Linear
from runtime.layers.linear import Projection
from runtime.models.build import build_model
from runtime.pages.plan import PageCount
from tests.runtime.tiny import CONFIG, tiny_checkpoint

TOKENS = 5
HIDDEN = CONFIG.hidden_size


class Recorded:
    """The `Reduce` of one rank, which records the shapes of the addends."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, addend: Tensor) -> Tensor:
        self.shapes.append(tuple(addend.shape))
        return addend


@pytest.mark.parametrize(
    ("o_rank", "down_rank", "sizes"),
    [
        pytest.param(None, None, (HIDDEN, HIDDEN), id="dense"),
        pytest.param(20, 30, (20, 30), id="factor pairs"),
        pytest.param(20, None, (20, HIDDEN), id="mixed"),
    ],
)
def test_each_layer_adds_two_outputs_in_the_low_rank_space_of_factor_pairs(
    o_rank: int | None, down_rank: int | None, sizes: tuple[int, int]
) -> None:
    ranks = (8, 8, 8, o_rank, 16, 16, down_rank)
    checkpoint = tiny_checkpoint(ranks=ranks)
    reduce = Recorded()
    batch = Batch.of([SequenceSlice(range(TOKENS), 0, (0,))])
    logits = []
    for model in (build_model(checkpoint, reduce=reduce), build_model(checkpoint)):
        cache = model.new_cache(PageCount(1))
        logits.append(model.forward(batch, cache))
    rows = (TOKENS, 1)[: CONFIG.num_layers]  # the last layer computes the logit row only
    assert reduce.shapes == [(n, size) for n in rows for size in sizes]
    assert torch.equal(*logits)


@pytest.mark.parametrize("rank", [None, 6])
def test_addends_of_two_ranks_give_the_output_of_the_whole_layer(rank: int | None) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, u, bias = random(3, 16), random(9, rank or 0), random(9)
    weight = random(rank or 9, 16)
    halves = weight.chunk(2, dim=1)

    def linear(inner: Tensor, bias: Tensor | None) -> Linear:
        return FactorPair(u, inner, bias) if rank else Dense(inner, bias)

    second: list[Tensor] = []

    def keep(addend: Tensor) -> Tensor:
        second.append(addend.clone())
        return addend

    # Only one rank holds the bias of a dense layer.
    other = Projection([linear(halves[1].contiguous(), bias if rank else None)], reduce=keep)
    other(x[:, 8:].contiguous())
    first = Projection(
        [linear(halves[0].contiguous(), bias)], reduce=lambda addend: addend + second[0]
    )
    expected = Projection([linear(weight, bias)])(x)
    torch.testing.assert_close(first(x[:, :8].contiguous()), expected, rtol=1e-5, atol=1e-5)
