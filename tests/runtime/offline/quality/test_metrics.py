"""KL divergence, agreement, perplexity and bootstrap intervals."""

import math

import pytest
import torch
from torch import Tensor

from runtime.errors import QualityError
from runtime.offline.quality.metrics import Bootstrap, compare, interval, summarize


def test_equal_logits_have_no_divergence() -> None:
    logits = torch.randn(300, 50, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(300) % 50
    summary = summarize([compare(logits, logits.clone(), tokens)], Bootstrap())
    assert summary.positions == 299
    assert (summary.kl_mean, summary.kl_p99, summary.top1) == (0.0, 0.0, 1.0)
    assert (summary.perplexity_change, summary.change_low, summary.change_high) == (0.0, 0.0, 0.0)


def test_scores_of_distributions_given_by_hand() -> None:
    baseline = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]).log()
    other = torch.tensor([[0.25, 0.75], [0.2, 0.8], [0.1, 0.9]]).log()
    scores = compare(baseline, other, torch.tensor([0, 1, 0]))
    expected = [
        0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75),
        0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8),
    ]
    assert scores.kl.tolist() == pytest.approx(expected, rel=1e-6)
    assert scores.same[1].item() is False
    assert scores.baseline_nll.tolist() == pytest.approx([-math.log(0.5), -math.log(0.9)])
    assert scores.nll.tolist() == pytest.approx([-math.log(0.75), -math.log(0.2)])


def test_perplexity_change_is_relative_to_the_baseline() -> None:
    baseline = torch.tensor([[0.5, 0.5]] * 5).log()
    other = torch.tensor([[0.6, 0.4]] * 5).log()
    summary = summarize([compare(baseline, other, torch.zeros(5, dtype=torch.int64))], Bootstrap())
    assert summary.perplexity == pytest.approx(1 / 0.6)
    bounds = summary.perplexity_change, summary.change_low, summary.change_high
    assert bounds == pytest.approx([0.5 / 0.6 - 1] * 3)


def test_texts_are_weighted_by_their_positions() -> None:
    low, high = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    texts = [
        compare(low.repeat(n, 1), other.repeat(n, 1), torch.zeros(n, dtype=torch.int64))
        for n, other in ((2, low), (4, high))
    ]
    kl = float(texts[1].kl[0])
    assert summarize(texts, Bootstrap()).kl_mean == pytest.approx(3 * kl / 4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = torch.zeros(3, 4)
    with pytest.raises(QualityError, match="finite"):
        compare(logits, torch.full((3, 4), bad), torch.tensor([0, 1, 2]))


def correlated(generator: torch.Generator, length: int) -> Tensor:
    """Return a moving average over 8 elements of white noise, around 0.3."""
    noise = torch.randn(length + 7, generator=generator, dtype=torch.float64)
    return 0.3 + noise.unfold(0, 8, 1).mean(-1)


def coverage(block: int, trials: int) -> float:
    generator = torch.Generator().manual_seed(5)
    covered = 0
    for _ in range(trials):
        series = [correlated(generator, 1000), correlated(generator, 600)]
        low, high = interval(series, Bootstrap(block=block, resamples=500))
        covered += low <= 0.3 <= high
    return covered / trials


def test_interval_covers_the_known_mean() -> None:
    """The nominal coverage is 95 %; with 25 blocks a percentile interval is a little too short."""
    assert 0.88 <= coverage(64, 300) <= 0.99


def test_single_tokens_as_blocks_would_ignore_correlation() -> None:
    assert coverage(1, 60) < 0.7


def test_interval_depends_on_the_seed_only() -> None:
    series = [correlated(torch.Generator().manual_seed(1), 500)]
    assert interval(series, Bootstrap()) == interval(series, Bootstrap())
    assert interval(series, Bootstrap()) != interval(series, Bootstrap(seed=1))
