"""Differences between the logits of two computations of the same text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import QualityError

_ROWS = 128
"""Rows of logits that are converted to fp64 at once."""


@dataclass(frozen=True)
class Scores:
    """Comparison with the baseline at each scored position of one text; tensors `[n]`.

    Attributes:
        kl: fp64, KL(baseline ‖ other) of the distributions of the next token, in nats.
        same: bool, whether both computations have the same most probable token.
        baseline_nll, nll: fp64, negative log-likelihood of the text's next token, in nats.
    """

    kl: Tensor
    same: Tensor
    baseline_nll: Tensor
    nll: Tensor


@dataclass(frozen=True)
class Bootstrap:
    """Parameters of `interval`.

    Attributes:
        block: consecutive tokens that are resampled together, because their errors are correlated.
        resamples: number of resampled means.
        level: probability that the interval should cover the mean.
    """

    block: int = 64
    resamples: int = 4000
    level: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class Summary:
    """Quality of one computation relative to the baseline, over all positions of all texts.

    Attributes:
        positions: number of scored positions.
        kl_mean, kl_p99: mean and 99th percentile of the KL divergence, in nats.
        top1: fraction of positions whose best token equals the baseline's.
        perplexity: exponential of the mean negative log-likelihood.
        perplexity_change: perplexity relative to the baseline's, minus 1.
        change_low, change_high: paired bootstrap interval of ``perplexity_change``.
    """

    positions: int
    kl_mean: float
    kl_p99: float
    top1: float
    perplexity: float
    perplexity_change: float
    change_low: float
    change_high: float


def compare(baseline: Tensor, other: Tensor, tokens: Tensor) -> Scores:
    """Compare the logits of a text at all positions but the last.

    Args:
        baseline, other: fp32 `[n, vocab]`, logits after each token.
        tokens: int64 `[n]`, the text.

    Raises:
        QualityError: there is no token to predict, or logits are not finite.
    """
    if len(tokens) < 2:
        raise QualityError("a text needs at least two tokens")
    if not (baseline.isfinite().all() and other.isfinite().all()):
        raise QualityError("logits are not finite")
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(tokens) - 1, _ROWS):
        rows = slice(start, min(start + _ROWS, len(tokens) - 1))
        following = tokens[1:][rows, None]
        p, q = (logits[rows].double().log_softmax(-1) for logits in (baseline, other))
        kl = (p.exp() * (p - q)).sum(-1)
        nll = (-scores.gather(1, following)[:, 0] for scores in (p, q))
        parts.append((kl, p.argmax(-1) == q.argmax(-1), *nll))
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def summarize(texts: Sequence[Scores], bootstrap: Bootstrap) -> Summary:
    """Summarize the scores of all texts; each position has the same weight."""
    kl = torch.cat([text.kl for text in texts])
    nll = torch.cat([text.nll for text in texts])
    differences = [text.nll - text.baseline_nll for text in texts]
    low, high = interval(differences, bootstrap)
    return Summary(
        positions=len(kl),
        kl_mean=float(kl.mean()),
        kl_p99=float(kl.quantile(0.99)),
        top1=float(torch.cat([text.same for text in texts]).double().mean()),
        perplexity=math.exp(nll.mean()),
        perplexity_change=math.expm1(torch.cat(differences).mean()),
        change_low=math.expm1(low),
        change_high=math.expm1(high),
    )


def interval(series: Sequence[Tensor], bootstrap: Bootstrap) -> tuple[float, float]:
    """Return a percentile bootstrap interval of the mean over all elements of all series.

    Each series is cut into blocks of consecutive elements, which are resampled with replacement
    (block bootstrap, Künsch 1989). The last block of a series may be shorter.

    Args:
        series: fp64 `[n_i]` each; elements of one series are correlated with their neighbours.
    """
    pieces = [block for one in series for block in torch.split(one, bootstrap.block)]
    sums = torch.stack([block.sum() for block in pieces])
    counts = torch.tensor([len(block) for block in pieces], dtype=torch.float64)
    generator = torch.Generator().manual_seed(bootstrap.seed)
    shape = (bootstrap.resamples, len(pieces))
    drawn = torch.randint(len(pieces), shape, generator=generator)
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    tail = (1 - bootstrap.level) / 2
    low, high = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high
