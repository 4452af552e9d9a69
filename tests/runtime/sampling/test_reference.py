"""The reference sampler: penalties, filters, distributions and reproducible draws."""

import math
from dataclasses import replace

import pytest
import torch

from runtime.core.request import SamplingParams
from runtime.sampling.reference import Draw, SamplingRow, _mix64, process_logits, uniform
from runtime.sampling.reference import sample as sample_or_none

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])


def sample(logits: torch.Tensor, rows: list[SamplingRow]) -> list[Draw]:
    """Sample from logits that must all be finite."""
    draws = [draw for draw in sample_or_none(logits, rows) if draw is not None]
    assert len(draws) == len(rows)
    return draws


def row(
    sampling: SamplingParams, tokens: tuple[int, ...] = (0,), prompt: int = 1, choice: int = 0
) -> SamplingRow:
    return SamplingRow(sampling, choice, tokens, prompt)


def counts(sampling: SamplingParams, logits: torch.Tensor, draws: int) -> torch.Tensor:
    """Return how often each token is drawn by ``draws`` choices, one draw each."""
    rows = [SamplingRow(sampling, choice, (0,), 1) for choice in range(draws)]
    tokens = [draw.token for draw in sample(logits.expand(draws, -1), rows)]
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def test_greedy_takes_the_first_of_the_largest_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0]])
    assert [draw.token for draw in sample(logits, [row(SamplingParams())] * 2)] == [1, 0]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        # prompt tokens 1, 2; output tokens 2, 3, 3; logits 2, 2, 2, 2, -2
        (SamplingParams(presence_penalty=0.5), [2.0, 2.0, 1.5, 1.5, -2.0]),
        (SamplingParams(frequency_penalty=0.5), [2.0, 2.0, 1.5, 1.0, -2.0]),
        (SamplingParams(presence_penalty=1.0, frequency_penalty=0.25), [2.0, 2.0, 0.75, 0.5, -2.0]),
        (SamplingParams(repetition_penalty=2.0), [2.0, 1.0, 1.0, 1.0, -2.0]),
        (SamplingParams(logit_bias={0: -1.0, 4: 3.0}), [1.0, 2.0, 2.0, 2.0, 1.0]),
        # bias first, then repetition, then frequency and presence
        (
            SamplingParams(logit_bias={3: -6.0}, repetition_penalty=2.0, presence_penalty=1.0),
            [2.0, 1.0, 0.0, -9.0, -2.0],
        ),
    ],
)
def test_penalties_and_bias(sampling: SamplingParams, expected: list[float]) -> None:
    logits = torch.tensor([2.0, 2.0, 2.0, 2.0, -2.0])
    process_logits(logits, row(sampling, (1, 2, 2, 3, 3), prompt=2))
    assert logits.tolist() == expected


def test_penalties_change_only_their_row_and_not_its_logprobs() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(2, 1)
    before = logits.clone()
    rows = [row(SamplingParams(logit_bias={2: 9.0}, logprobs=2)), row(SamplingParams(logprobs=0))]
    biased, plain = sample(logits, rows)
    assert torch.equal(logits, before)
    expected = before[0].log_softmax(0).tolist()
    assert (biased.token, plain.token) == (2, 0)
    assert biased.logprob == pytest.approx(expected[2])
    assert [token for token, _ in biased.top] == [0, 1]
    assert [value for _, value in biased.top] == pytest.approx(expected[:2])
    assert plain.logprob == pytest.approx(expected[0])
    assert plain.top == ()


def test_suppressed_tokens_are_sampled_from_min_tokens_on() -> None:
    """The prompt has one token, so that the output index is one less than the length."""
    logits = torch.tensor([[2.0, 9.0, 8.0]])
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(
            temperature=temperature,
            top_p=0.5,
            logit_bias={1: 100.0},
            min_tokens=3,
            suppressed=frozenset({1, 2}),
        )
        tokens = [0]
        for _ in range(5):
            tokens.append(sample(logits, [row(sampling, tuple(tokens))])[0].token)
        assert tokens[1:] == [0, 0, 0, 1, 1]


def test_only_allowed_tokens_are_sampled() -> None:
    logits = torch.tensor([[2.0, 9.0, 8.0, 1.0]])
    allowed = SamplingParams(allowed_token_ids=frozenset({0, 3}), logit_bias={3: -5.0}, logprobs=0)
    (draw,) = sample(logits, [row(allowed)])
    assert draw.token == 0
    assert draw.logprob == pytest.approx(logits[0].log_softmax(0)[0].item())
    drawn = SamplingParams(temperature=1.0, top_k=3, allowed_token_ids=frozenset({0, 3}))
    tokens = {sample(logits, [row(replace(drawn, seed=seed))])[0].token for seed in range(60)}
    assert tokens == {0, 3}


def test_bad_words_are_completed_by_no_token() -> None:
    """The prompt, of one token, counts for no bad word."""
    logits = torch.tensor([[2.0, 9.0, 8.0]])
    for bad_words, expected in (
        (((1,),), [2, 2, 2, 2]),
        (((1, 1),), [1, 2, 1, 2]),
        (((1, 1, 1), (2, 1)), [1, 1, 2, 2]),
        (((0, 1),), [1, 1, 1, 1]),
        (((1, 1), (1, 2)), [1, 0, 1, 0]),
    ):
        tokens = [0]
        for _ in range(4):
            sampling = SamplingParams(bad_words=bad_words)
            tokens.append(sample(logits, [row(sampling, tuple(tokens))])[0].token)
        assert tokens[1:] == expected, bad_words


def test_suppressed_tokens_keep_their_log_probability() -> None:
    logits = torch.tensor([[2.0, 9.0, 8.0]])
    sampling = SamplingParams(min_tokens=1, suppressed=frozenset({1}), logprobs=1)
    (draw,) = sample(logits, [row(sampling)])
    assert draw.token == 2
    assert draw.top[0][0] == 1
    assert draw.logprob == pytest.approx(logits[0].log_softmax(0)[2].item())


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        (SamplingParams(temperature=1.0, top_k=2), {1, 3}),
        (SamplingParams(temperature=1.0, top_k=1), {1}),
        (SamplingParams(temperature=1.0, top_p=0.39), {1}),
        (SamplingParams(temperature=1.0, top_p=0.41), {1, 3}),
        (SamplingParams(temperature=1.0, top_p=0.66), {1, 3, 4}),
        (SamplingParams(temperature=1.0, min_p=0.3), {1, 3, 4}),
        # top-p applies to the distribution after top-k: 0.4 / 0.65 = 0.615
        (SamplingParams(temperature=1.0, top_k=2, top_p=0.61), {1}),
        (SamplingParams(temperature=1.0, top_k=2, top_p=0.62), {1, 3}),
        # min-p applies after temperature 2, which takes square roots of ratios: √(0.1 / 0.4) = 0.5
        (SamplingParams(temperature=2.0, min_p=0.49), {1, 2, 3, 4}),
        (SamplingParams(temperature=2.0, min_p=0.51), {1, 3, 4}),
    ],
)
def test_filters_and_the_resulting_distribution(
    sampling: SamplingParams, support: set[int]
) -> None:
    draws = 4000
    got = counts(sampling, PROBABILITIES.log(), draws)
    weights = PROBABILITIES ** (1 / sampling.temperature)
    weights *= torch.tensor([float(token in support) for token in range(5)])
    expected = weights / weights.sum() * draws
    assert set(got.nonzero()[:, 0].tolist()) == support
    # Counts are binomial; allow five standard deviations. Seeds are fixed.
    assert bool(((got - expected).abs() <= 5 * expected.sqrt() + 1e-9).all())


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.999),
        SamplingParams(temperature=1.0, top_k=2500),
        SamplingParams(temperature=1.0, min_p=1e-9),
    ],
)
def test_flat_distributions_draw_beyond_the_candidates(sampling: SamplingParams) -> None:
    vocab, draws = 3000, 2000
    logits = torch.linspace(0.0, 0.1, vocab)
    got = counts(sampling, logits, draws)
    kept = 2500 if sampling.top_k else vocab
    assert bool((got[: vocab - kept] == 0).all())
    half = got[vocab - kept : vocab - kept // 2].sum() / draws
    weights = logits.exp()[vocab - kept :]
    expected = weights[: kept - kept // 2].sum() / weights.sum()
    assert abs(half - expected) < 5 * 0.5 / math.sqrt(draws)


def test_draw_depends_only_on_its_row() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)) * 3
    samplings = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.5, top_p=0.9, seed=2),
        SamplingParams(),
        SamplingParams(temperature=2.0, min_p=0.01, seed=3),
        SamplingParams(temperature=9.0, top_k=1500, seed=4),
        SamplingParams(temperature=1.0, frequency_penalty=1.0, seed=5),
    ]
    rows = [row(s, (1, 2, 3, 3), prompt=2) for s in samplings]
    alone = [sample(logits[n : n + 1], [rows[n]])[0] for n in range(6)]
    assert sample(logits, rows) == alone
    assert sample(logits.flip(0), rows[::-1]) == alone[::-1]


def test_seed_choice_and_index_each_change_the_draw() -> None:
    flat = torch.zeros(1, 50_000)

    def token(seed: int, choice: int, output: int) -> int:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        return sample(flat, [SamplingRow(sampling, choice, (0,) * (3 + output), 3)])[0].token

    draws = [token(1, 0, 0), token(2, 0, 0), token(1, 1, 0), token(1, 0, 1), token(1, 0, 2)]
    assert len(set(draws)) == 5
    assert token(1, 0, 1) == draws[3]


def test_uniforms_are_a_fixed_hash_of_seed_choice_and_index() -> None:
    values = {
        (s, c, i): uniform(s, c, i) for s in (0, 1, 2**64 - 1) for c in (0, 1) for i in (0, 1)
    }
    assert len(set(values.values())) == len(values)
    assert all(0.0 <= value < 1.0 for value in values.values())
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
    assert _mix64(0) == 0xE220A8397B1DCDAF  # the published generator's first output from state 0
    assert uniform(7, 1, 2) == 0.08945047175044918  # must not change between versions
    series = torch.tensor([uniform(7, 0, index) for index in range(4000)])
    assert abs(series.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 4000)
    assert abs(series.square().mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / 4000)
    assert abs(torch.corrcoef(torch.stack([series[:-1], series[1:]]))[0, 1]) < 5 / math.sqrt(4000)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_non_finite_row_has_no_draw_and_does_not_affect_others(
    temperature: float, broken: float
) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    rows = [
        SamplingRow(SamplingParams(temperature=temperature, seed=3), n, (0,), 1) for n in range(3)
    ]
    before = sample(logits, rows)
    logits[1, 4321] = broken
    assert sample_or_none(logits, rows) == [before[0], None, before[2]]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, repetition_penalty=1e-300, seed=1),
        SamplingParams(temperature=1.0, top_p=1e-320, min_p=1.0, seed=1),
        SamplingParams(temperature=1.0, top_p=1e-320, top_k=1, seed=1),
        SamplingParams(temperature=1e-6, logit_bias={1: 3e38, 2: -3e38}, seed=1),
    ],
    ids=["penalty", "min-p", "top-k", "bias"],
)
def test_extreme_parameters_still_draw_a_token(sampling: SamplingParams) -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(2))
    (draw,) = sample(logits, [row(sampling, tokens=(1, 2, 3), prompt=2)])
    assert 0 <= draw.token < 5000
