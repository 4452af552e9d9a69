"""Elements that a layer of LLaMA-3-70B exchanges for a token, as in the DeInfer paper."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.checkpoint.weights import FactorPair
from runtime.models.llama import LLAMA
from runtime.offline.bench.arithmetic import arithmetic_of, exchanges_of
from runtime.offline.bench.ranks import Elements
from runtime.offline.bench.shapes import SHAPES
from runtime.parallel.partition import Partition, Scheme

CONFIG = SHAPES["llama-3-70b"]
LAYOUT = LLAMA.layout(CONFIG)
LINEARS = LAYOUT.linears
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


def elements_of(layer: Any, partition: Partition) -> Elements:
    return sum(exchanges_of(layer, LAYOUT, partition), Elements())


def test_base_adds_the_whole_outputs() -> None:
    found = elements_of(LAYER, Partition.of(CONFIG, 0, 4, Scheme.BASE))
    assert found.twice == 167_936


def test_even_scheme_adds_the_outputs_of_all_v_and_two_squares() -> None:
    low, even = (
        elements_of(LAYER, Partition.of(CONFIG, 0, 4, scheme))
        for scheme in (Scheme.LOW_RANK, Scheme.EVEN)
    )
    assert abs(even.once - low.once - 2) < 64, "but for the padding of the stacked V"
    assert even.twice == 2 * even.once


def test_even_scheme_gathers_the_residual_stream_for_dense_matrices() -> None:
    layer = SimpleNamespace(**{**vars(LAYER), "q": object()})
    pairs, mixed = (
        elements_of(each, Partition.of(CONFIG, 0, 4, Scheme.EVEN)) for each in (LAYER, layer)
    )
    heads = sum(getattr(LAYER, name).rank for name in "qkv")
    assert abs(pairs.once - mixed.once - (heads - CONFIG.hidden_size - (heads - LAYER.q.rank))) < 64


def test_low_rank_scheme_exchanges_about_a_fifth() -> None:
    found = elements_of(LAYER, Partition.of(CONFIG, 0, 4))
    assert abs(found.twice - 35_640) < 64, "but for the padding of the stacked V"


def test_even_scheme_replicates_no_matrix() -> None:
    """`low-rank` replicates U of o and down."""
    dense, low, even = (
        arithmetic_of(CONFIG, keep, 4, scheme)
        for keep, scheme in ((1.0, Scheme.LOW_RANK), (0.6, Scheme.LOW_RANK), (0.6, Scheme.EVEN))
    )
    assert even.bytes_read / dense.bytes_read == pytest.approx(0.6, abs=0.01)
    assert low.bytes_read / even.bytes_read > 1.2
    assert (dense.collectives, low.collectives, even.collectives) == (2, 4, 4)
