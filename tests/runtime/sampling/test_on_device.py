"""The sampler that a graph can hold draws the tokens of the one that asks the host."""

from dataclasses import replace

import pytest
import torch

from runtime.core.request import SamplingParams
from runtime.sampling.on_device import EVERYTHING, Needs, StaticSampler, uniforms
from runtime.sampling.reference import Draw, SamplingRow, sample, uniform

VOCAB = 1500
CPU = torch.device("cpu")
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_p=0.9, seed=2**63 + 5),
    SamplingParams(temperature=1.0, top_k=40, seed=3),
    SamplingParams(temperature=1.0, min_p=0.05, top_p=0.8, seed=2**64 - 1),
    SamplingParams(temperature=0.9, presence_penalty=0.7, frequency_penalty=0.4, seed=4),
    SamplingParams(repetition_penalty=1.3, logit_bias={3: 4.0, 700: -100.0}),
    SamplingParams(temperature=1.0, repetition_penalty=0.8, logit_bias={5: 2.5}, seed=6),
    SamplingParams(temperature=50.0, seed=7),  # flat: the candidates do not decide it
]


def logits_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(len(KINDS), VOCAB, generator=generator) * 3


def drawn(sampler: StaticSampler, logits: torch.Tensor, needs: Needs = EVERYTHING) -> list[int]:
    """By the candidates, and the rest by all. Returns which those were."""
    sampler(logits, needs)
    rest = (sampler.decided[: len(logits)] == 0).nonzero()[:, 0].tolist()
    sampler.redraw(logits, rest)
    return rest


def draws(logits: torch.Tensor, rows: list[SamplingRow]) -> list[Draw]:
    found = [draw for draw in sample(logits, rows) if draw is not None]
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("choice", [0, 3])
def test_many_steps_give_the_same_tokens(choice: int) -> None:
    texts = [[7, 9, 700, 3, number] for number in range(len(KINDS))]
    sampler = StaticSampler(len(KINDS), VOCAB, CPU)
    rows = [
        SamplingRow(sampling, choice, text, 4) for sampling, text in zip(KINDS, texts, strict=True)
    ]
    sampler.load(range(len(KINDS)), rows)
    undecided = 0
    for step in range(40):
        logits = logits_of(step)
        rows = [SamplingRow(s, choice, text, 4) for s, text in zip(KINDS, texts, strict=True)]
        expected = [draw.token for draw in draws(logits, rows)]
        undecided += len(drawn(sampler, logits))
        assert sampler.tokens.tolist() == expected, step
        assert bool(sampler.finite.all())
        for text, token in zip(texts, expected, strict=True):
            text.append(token)
    assert undecided > 0


def test_a_row_that_is_not_decided_stays_where_it_was() -> None:
    """Called again, with the same logits, it is as if the first call had not been."""
    sampling = replace(KINDS[5], temperature=50.0, repetition_penalty=1.3)
    text, sampler = [7, 9, 700], StaticSampler(1, VOCAB, CPU)
    sampler.load([0], [SamplingRow(sampling, 2, text, 2)])
    called_again = 0
    for step in range(30):
        logits = logits_of(step)[:1]
        (expected,) = draws(logits, [SamplingRow(sampling, 2, text, 2)])
        sampler(logits)
        if not sampler.decided[0]:
            sampler(logits)
            assert not sampler.decided[0]
            sampler.redraw(logits, [0])
            called_again += 1
        assert sampler.tokens.tolist() == [expected.token]
        text.append(expected.token)
    assert called_again > 3


def test_a_row_may_become_another_sequences() -> None:
    sampler = StaticSampler(2, VOCAB, CPU)
    for step, (first, second) in enumerate([(5, 1), (2, 6), (7, 0)]):
        rows = [
            SamplingRow(KINDS[first], 0, [1, 2, 3, step], 2),
            SamplingRow(KINDS[second], 1, [9] * (step + 1), step + 1),
        ]
        sampler.load([0, 1], rows)
        logits = logits_of(step)[:2]
        drawn(sampler, logits)
        assert sampler.tokens.tolist() == [draw.token for draw in draws(logits, rows)]


def test_log_probabilities_are_the_models_own() -> None:
    sampler = StaticSampler(len(KINDS), VOCAB, CPU, top=3)
    asked = [
        SamplingRow(
            SamplingParams(temperature=s.temperature, seed=s.seed, logprobs=3, logit_bias={9: 8.0}),
            0,
            (),
            0,
        )
        for s in KINDS
    ]
    sampler.load(range(len(KINDS)), asked)
    logits = logits_of(0)
    drawn(sampler, logits)
    for number, draw in enumerate(draws(logits, asked)):
        assert int(sampler.tokens[number]) == draw.token
        assert float(sampler.logprobs[number]) == draw.logprob
        assert sampler.top_tokens[number].tolist() == [token for token, _ in draw.top]
        assert sampler.top_logprobs[number].tolist() == [value for _, value in draw.top]


def test_what_is_not_finite_is_said() -> None:
    sampler = StaticSampler(3, VOCAB, CPU)
    logits = torch.zeros(3, VOCAB)
    logits[1, 7] = torch.nan
    logits[2, 9] = torch.inf
    sampler(logits)
    assert sampler.finite.tolist() == [1, 0, 0]


@pytest.mark.parametrize("kinds", [[0, 0], [0, 1], [6, 0], [1, 5, 8]])
def test_what_no_row_needs_makes_no_difference(kinds: list[int]) -> None:
    """And rows of the sampler that no logits come for stay as they are."""
    rows = [SamplingRow(KINDS[kind], 0, [4, 700, 3], 2) for kind in kinds]
    needs = Needs.of(row.sampling for row in rows)
    assert needs != EVERYTHING
    samplers = [StaticSampler(4, VOCAB, CPU) for _ in range(2)]
    for sampler in samplers:
        sampler.load(range(len(rows)), rows)
    for step in range(5):
        logits = logits_of(step)[: len(rows)]
        for sampler, wanted in zip(samplers, (needs, EVERYTHING), strict=True):
            drawn(sampler, logits, wanted)
        assert torch.equal(samplers[0].tokens, samplers[1].tokens)
        assert samplers[0].tokens[len(rows) :].tolist() == [0] * (4 - len(rows))


def test_random_numbers_are_those_of_the_host() -> None:
    words = [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    signed = torch.tensor([word - (1 << 64) if word >> 63 else word for word in words])
    for choice, index in ((0, 0), (3, 17), (2**40, 5)):
        got = uniforms(signed, torch.full_like(signed, choice), torch.full_like(signed, index))
        assert got.tolist() == [uniform(word, choice, index) for word in words]
