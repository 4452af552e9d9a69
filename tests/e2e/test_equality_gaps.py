"""Tokens whose gap is large do not change if logits are rounded differently."""

import random

import pytest
import torch

from runtime.core.request import SamplingParams
from runtime.sampling.reference import SamplingRow, sample
from tests.programs.equality import EPSILON, TOP_K, TOP_P, Case, gap_of

CASES = 3000


def drawn(case: Case, logits: torch.Tensor, index: int) -> tuple[int, list[float]]:
    sampling = SamplingParams(
        temperature=case.temperature, top_k=TOP_K, top_p=TOP_P, seed=case.seed, logprobs=TOP_K + 1
    )
    (found,) = sample(logits[None], [SamplingRow(sampling, 0, (0,) * (1 + index), 1)])
    assert found is not None
    return found.token, [logprob for _, logprob in found.top]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
def test_only_tokens_with_a_small_gap_change_with_rounding(temperature: float) -> None:
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    changed = close = 0
    for _ in range(CASES):
        index = rng.randrange(50)
        case = Case("", (), temperature, rng.getrandbits(32), 1)
        logits = torch.randn(40, generator=generator) * rng.choice((1, 3, 30))
        rounding = (torch.rand(40, generator=generator) - 0.5) * EPSILON
        token, top = drawn(case, logits, index)
        other, _ = drawn(case, logits + rounding, index)
        gap = gap_of(case, index, top)
        assert token == other or gap < EPSILON
        changed += token != other
        close += gap < EPSILON
    assert changed > CASES / 200
    assert close < CASES / 5
