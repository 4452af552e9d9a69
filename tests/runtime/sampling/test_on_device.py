"""The device sampler produces the same tokens as the reference sampler."""

from dataclasses import replace

import pytest
import torch

from runtime.core.request import SamplingParams
from runtime.layers.vocabulary import Vocabulary
from runtime.sampling.on_device import ALL_FEATURES, DeviceSampler, SamplingFeatures, uniforms
from runtime.sampling.reference import Draw, SamplingRow, sample, uniform

VOCAB = 1500
WHOLE = Vocabulary.of(VOCAB)
CPU = torch.device("cpu")
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_p=0.9, seed=2**63 + 5),
    SamplingParams(temperature=1.0, top_k=40, seed=3),
    SamplingParams(temperature=1.0, min_p=0.05, top_p=0.8, seed=2**64 - 1),
    SamplingParams(temperature=0.9, presence_penalty=0.7, frequency_penalty=0.4, seed=4),
    SamplingParams(repetition_penalty=1.3, logit_bias={3: 4.0, 700: -100.0}),
    SamplingParams(temperature=1.0, repetition_penalty=0.8, logit_bias={5: 2.5}, seed=6),
    SamplingParams(temperature=50.0, seed=7),  # flat distribution: 1,024 candidates do not suffice
    SamplingParams(logit_bias={3: 90.0}, min_tokens=12, suppressed=frozenset({3, 9})),
    SamplingParams(temperature=50.0, seed=8, min_tokens=30, suppressed=frozenset(range(700))),
    SamplingParams(temperature=1.0, seed=9, allowed_token_ids=frozenset({5, 6, 700})),
    SamplingParams(logit_bias={8: 90.0, 9: 80.0}, bad_words=((8, 8), (9, 8), (12,))),
    SamplingParams(temperature=60.0, seed=10, bad_words=tuple((t,) for t in range(0, 300, 3))),
    SamplingParams(
        temperature=1.0,
        seed=11,
        allowed_token_ids=frozenset({1, 2, 3}),
        bad_words=((1, 2), (2, 1, 1), (1, 1, 2)),
    ),
]


def logits_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(len(SAMPLINGS), VOCAB, generator=generator) * 3


def sample_on_device(
    sampler: DeviceSampler, logits: torch.Tensor, features: SamplingFeatures = ALL_FEATURES
) -> list[int]:
    """Sample, resolve the unresolved rows, and return their indices."""
    sampler(logits, features)
    rest = (sampler.resolved[: len(logits)] == 0).nonzero()[:, 0].tolist()
    sampler.resolve(logits, rest)
    return rest


def draws(logits: torch.Tensor, rows: list[SamplingRow]) -> list[Draw]:
    found = [draw for draw in sample(logits, rows) if draw is not None]
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("choice", [0, 3])
def test_tokens_equal_the_reference_over_many_steps(choice: int) -> None:
    texts = [[7, 9, 700, 3, number] for number in range(len(SAMPLINGS))]
    sampler = DeviceSampler(len(SAMPLINGS), WHOLE, CPU)
    rows = [
        SamplingRow(sampling, choice, text, 4)
        for sampling, text in zip(SAMPLINGS, texts, strict=True)
    ]
    sampler.load(range(len(SAMPLINGS)), rows)
    unresolved = 0
    for step in range(40):
        logits = logits_of(step)
        rows = [SamplingRow(s, choice, text, 4) for s, text in zip(SAMPLINGS, texts, strict=True)]
        expected = [draw.token for draw in draws(logits, rows)]
        unresolved += len(sample_on_device(sampler, logits))
        assert sampler.tokens.tolist() == expected, step
        assert bool(sampler.finite.all())
        for text, token in zip(texts, expected, strict=True):
            text.append(token)
    assert unresolved > 0


def test_unresolved_row_does_not_advance() -> None:
    """A second call with the same logits gives the same result as the first."""
    sampling = replace(SAMPLINGS[5], temperature=50.0, repetition_penalty=1.3)
    text = [7, 9, 700]
    sampler = DeviceSampler(1, WHOLE, CPU)
    sampler.load([0], [SamplingRow(sampling, 2, text, 2)])
    called_again = 0
    for step in range(30):
        logits = logits_of(step)[:1]
        (expected,) = draws(logits, [SamplingRow(sampling, 2, text, 2)])
        sampler(logits)
        if not sampler.resolved[0]:
            sampler(logits)
            assert not sampler.resolved[0]
            sampler.resolve(logits, [0])
            called_again += 1
        assert sampler.tokens.tolist() == [expected.token]
        text.append(expected.token)
    assert called_again > 3


def test_row_can_be_loaded_with_another_sequence() -> None:
    sampler = DeviceSampler(2, WHOLE, CPU)
    for step, (first, second) in enumerate([(5, 1), (2, 6), (7, 0)]):
        rows = [
            SamplingRow(SAMPLINGS[first], 0, [1, 2, 3, step], 2),
            SamplingRow(SAMPLINGS[second], 1, [9] * (step + 1), step + 1),
        ]
        sampler.load([0, 1], rows)
        logits = logits_of(step)[:2]
        sample_on_device(sampler, logits)
        assert sampler.tokens.tolist() == [draw.token for draw in draws(logits, rows)]


def test_suppressed_tokens_of_an_earlier_sequence_have_no_effect() -> None:
    sampler = DeviceSampler(1, WHOLE, CPU)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 5.0
    suppresses = SamplingParams(min_tokens=4, suppressed=frozenset({7}))
    for sampling, token in (
        (suppresses, 0),
        (replace(suppresses, suppressed=frozenset()), 7),
        (suppresses, 0),
        (SamplingParams(presence_penalty=0.5), 7),
    ):
        sampler.load([0], [SamplingRow(sampling, 0, (1,), 1)])
        sampler(logits)
        assert sampler.tokens.tolist() == [token]


def test_log_probabilities_come_from_unprocessed_logits() -> None:
    sampler = DeviceSampler(len(SAMPLINGS), WHOLE, CPU, top=3)
    asked = [
        SamplingRow(
            SamplingParams(temperature=s.temperature, seed=s.seed, logprobs=3, logit_bias={9: 8.0}),
            0,
            (),
            0,
        )
        for s in SAMPLINGS
    ]
    sampler.load(range(len(SAMPLINGS)), asked)
    logits = logits_of(0)
    sample_on_device(sampler, logits)
    for number, draw in enumerate(draws(logits, asked)):
        assert int(sampler.tokens[number]) == draw.token
        assert float(sampler.logprobs[number]) == draw.logprob
        assert sampler.top_tokens[number].tolist() == [token for token, _ in draw.top]
        assert sampler.top_logprobs[number].tolist() == [value for _, value in draw.top]


def test_non_finite_rows_are_reported() -> None:
    sampler = DeviceSampler(3, WHOLE, CPU)
    logits = torch.zeros(3, VOCAB)
    logits[1, 7] = torch.nan
    logits[2, 9] = torch.inf
    sampler(logits)
    assert sampler.finite.tolist() == [1, 0, 0]


@pytest.mark.parametrize("kinds", [[0, 0], [0, 1], [6, 0], [1, 5, 8]])
def test_unused_features_do_not_change_tokens(kinds: list[int]) -> None:
    """Rows for which no logits are given keep their tokens."""
    rows = [SamplingRow(SAMPLINGS[kind], 0, [4, 700, 3], 2) for kind in kinds]
    features = SamplingFeatures.of([row.sampling for row in rows])
    assert features != ALL_FEATURES
    samplers = [DeviceSampler(4, WHOLE, CPU) for _ in range(2)]
    for sampler in samplers:
        sampler.load(range(len(rows)), rows)
    for step in range(5):
        logits = logits_of(step)[: len(rows)]
        for sampler, wanted in zip(samplers, (features, ALL_FEATURES), strict=True):
            sample_on_device(sampler, logits, wanted)
        assert torch.equal(samplers[0].tokens, samplers[1].tokens)
        assert samplers[0].tokens[len(rows) :].tolist() == [0] * (4 - len(rows))


def test_uniforms_equal_the_reference() -> None:
    words = [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    signed = torch.tensor([word - (1 << 64) if word >> 63 else word for word in words])
    for choice, index in ((0, 0), (3, 17), (2**40, 5)):
        got = uniforms(signed, torch.full_like(signed, choice), torch.full_like(signed, index))
        assert got.tolist() == [uniform(word, choice, index) for word in words]
