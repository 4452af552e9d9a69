"""Draws of the Triton kernels equal those of the reference."""

from dataclasses import replace

import pytest
import torch

from runtime.core.request import SamplingParams
from runtime.layers.vocabulary import Vocabulary
from runtime.parallel.partition import Partition
from runtime.sampling.gpu import find_candidates
from runtime.sampling.on_device import DeviceSampler
from runtime.sampling.reference import Candidates, SamplingRow
from tests.runtime.device import DEVICE, random
from tests.runtime.rank_threads import ThreadGroup, on_ranks
from tests.runtime.sampling.test_equal_logits import FILTERS
from tests.runtime.sampling.test_on_device import (
    SAMPLINGS,
    VOCAB,
    WHOLE,
    draws,
    logits_of,
    sample_on_device,
)
from tests.runtime.tiny import CONFIG

pytestmark = [pytest.mark.triton, pytest.mark.slow]

STEPS = 12


def test_candidates_equal_the_reference() -> None:
    logits = random(3, 40_000)[:, :39_001] * 5
    temperature = torch.tensor([[0.3], [1.0], [7.0]], dtype=torch.float64, device=DEVICE)
    found, expected = find_candidates(logits, temperature), Candidates.of(logits, temperature)
    assert torch.equal(found.values, expected.values)
    torch.testing.assert_close(found.log_sum, expected.log_sum, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("filters", FILTERS)
def test_equal_logits_are_in_the_order_of_token_ids(filters: SamplingParams) -> None:
    logits = (random(4, VOCAB) * 2).round()
    rows = [SamplingRow(replace(filters, temperature=1.0), n, (1,), 1) for n in range(4)]
    sampler = DeviceSampler(len(rows), WHOLE, DEVICE, kernels=True)
    sampler.load(range(len(rows)), rows)
    expected = [draw.token for draw in draws(logits.cpu(), rows)]
    sample_on_device(sampler, logits)
    assert sampler.tokens.tolist() == expected


@pytest.mark.long
def test_tokens_equal_the_reference_over_many_steps() -> None:
    texts = [[7, 9, 700, 3, number] for number in range(len(SAMPLINGS))]
    sampler = DeviceSampler(len(SAMPLINGS), WHOLE, DEVICE, kernels=True)
    for step in range(STEPS):
        rows = [SamplingRow(s, 3, text, 4) for s, text in zip(SAMPLINGS, texts, strict=True)]
        if step == 0:
            sampler.load(range(len(SAMPLINGS)), rows)
        expected = [draw.token for draw in draws(logits_of(step), rows)]
        sample_on_device(sampler, logits_of(step).to(DEVICE))
        assert sampler.tokens.tolist() == expected, step
        for text, token in zip(texts, expected, strict=True):
            text.append(token)


def test_ranks_sample_the_tokens_of_the_reference() -> None:
    vocabulary = Partition.of(CONFIG, 0, 2).vocabulary
    size = vocabulary[-1].stop
    samplings = [each for each in SAMPLINGS if not each.processes_logits]
    rows = [SamplingRow(each, 0, (1, 2), 2) for each in samplings]
    logits = random(len(rows), size) * 2
    expected = [draw.token for draw in draws(logits.cpu(), rows)]

    def run(group: ThreadGroup) -> list[int]:
        sampler = DeviceSampler(len(rows), Vocabulary(vocabulary, group), DEVICE, kernels=True)
        sampler.load(range(len(rows)), rows)
        own = vocabulary[group.rank]
        sample_on_device(sampler, logits[:, own.start : own.stop].contiguous())
        found: list[int] = sampler.tokens.tolist()
        return found

    assert on_ranks(2, run) == [expected, expected]
    assert size < VOCAB  # everything is a candidate here, and not in the other test
