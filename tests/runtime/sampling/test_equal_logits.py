"""Draws among equal logits: in the order of token ids, in any batch, on any device.

Logits computed in bf16 are often equal. With a GPU, the tests run on it.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from runtime.core.request import SamplingParams
from runtime.layers.vocabulary import Vocabulary
from runtime.sampling import reference
from runtime.sampling.on_device import DeviceSampler
from runtime.sampling.reference import SamplingRow, SamplingTensors, draw_from_all, sample
from tests.runtime.device import DEVICE

pytestmark = pytest.mark.triton  # to run with the tests of kernels on a GPU

VOCAB = 5000
FILTERS = [
    SamplingParams(),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.75),
    SamplingParams(top_k=50),
    SamplingParams(min_p=0.05),
]


def all_equal() -> Tensor:
    return torch.zeros(VOCAB)


def four_equal() -> Tensor:
    return torch.full((VOCAB,), -60.0).index_fill(0, torch.tensor([4999, 5, 2040, 99]), 20.0)


def rounded() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (3 * torch.randn(VOCAB, generator=generator)).bfloat16().float()


LOGITS = [all_equal, four_equal, rounded]


def rows_of(filters: SamplingParams, count: int) -> list[SamplingRow]:
    """Return rows that differ in their random numbers."""
    sampling = SamplingParams(1.0, filters.top_p, filters.top_k, filters.min_p, seed=5)
    return [SamplingRow(sampling, choice, (1, 2, 3), 3) for choice in range(count)]


@pytest.mark.parametrize("make", LOGITS)
@pytest.mark.parametrize("filters", FILTERS)
def test_draws_equal_those_from_all_tokens_ordered_by_logit_and_id(
    make: Callable[[], Tensor], filters: SamplingParams
) -> None:
    rows = rows_of(filters, 64)
    logits = make().to(DEVICE).expand(len(rows), -1)
    expected = draw_from_all(logits, SamplingTensors.of(rows, VOCAB, logits.device)).tolist()
    assert [draw.token for draw in sample(logits, rows) if draw] == expected
    sampler = DeviceSampler(len(rows), Vocabulary.of(VOCAB), logits.device)
    sampler.load(range(len(rows)), rows)
    sampler(logits)
    found = sampler.tokens.tolist()
    resolved = sampler.resolved.tolist()
    assert [t for t, known in zip(found, resolved, strict=True) if known] == [
        t for t, known in zip(expected, resolved, strict=True) if known
    ]
    if missing := [number for number, known in enumerate(resolved) if not known]:
        sampler.resolve(logits, missing)
    assert sampler.tokens.tolist() == expected


@pytest.mark.parametrize("make", LOGITS)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("size", [2, 33])
def test_draws_do_not_depend_on_the_batch(
    make: Callable[[], Tensor], filters: SamplingParams, size: int
) -> None:
    rows = rows_of(filters, 8)
    other = torch.randn(size, VOCAB, generator=torch.Generator().manual_seed(size)).to(DEVICE)
    others = rows_of(SamplingParams(), size)
    for number, row in enumerate(rows):
        logits = make().to(DEVICE)
        alone = sample(logits[None], [row])
        batch = other.clone()
        at = number % size
        batch[at] = logits
        assert sample(batch, [*others[:at], row, *others[at + 1 :]])[at] == alone[0]


@pytest.mark.parametrize("ulps", [-4, -1, 0, 1, 4])
def test_rounding_of_probabilities_does_not_move_the_limit_of_top_p(ulps: int) -> None:
    """The order in which probabilities are summed may depend on the size of the batch."""
    rows = rows_of(SamplingParams(top_p=0.5), 32)
    parameters = SamplingTensors.of(rows, 4, torch.device("cpu"))
    mass = torch.full((len(rows), 4), 0.25, dtype=torch.float64) * (1 + ulps * 2.0**-52)
    picks, resolved = reference._pick(mass, parameters, 4)
    assert set(picks.tolist()) == {0, 1}
    assert bool(resolved.all())
