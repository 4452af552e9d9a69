"""Elements that a layer of LLaMA-3-70B exchanges for a token, as in the DeInfer paper."""

from types import SimpleNamespace

import torch

from runtime.checkpoint.weights import FactorPair
from runtime.models.llama import LLAMA
from runtime.offline.bench.shapes import SHAPES
from runtime.offline.bench.tp import elements_of
from runtime.parallel.partition import Partition, Scheme

CONFIG = SHAPES["llama-3-70b"]
LINEARS = LLAMA.layout(CONFIG).linears
FRACTION = 0.6
"""Rank of each factor pair, as a fraction of the smaller side of the matrix."""
LAYER = SimpleNamespace(
    **{
        name: FactorPair(
            torch.empty(linear.out, rank, device="meta"),
            torch.empty(rank, linear.inner, device="meta"),
        )
        for name, linear in LINEARS.items()
        for rank in [int(FRACTION * min(linear.out, linear.inner))]
    }
)


def test_base_adds_the_whole_outputs() -> None:
    found = elements_of(LAYER, LINEARS, Partition.of(CONFIG, 0, 4, Scheme.BASE))
    assert found.twice == 167_936


def test_even_scheme_also_gathers_two_outputs() -> None:
    low, even = (
        elements_of(LAYER, LINEARS, Partition.of(CONFIG, 0, 4, scheme))
        for scheme in (Scheme.LOW_RANK, Scheme.EVEN)
    )
    assert even.once - low.once == even.twice - low.twice == 2 * CONFIG.hidden_size


def test_low_rank_scheme_exchanges_about_a_fifth() -> None:
    found = elements_of(LAYER, LINEARS, Partition.of(CONFIG, 0, 4))
    assert abs(found.twice - 35_640) < 64, "but for the padding of the stacked V"
