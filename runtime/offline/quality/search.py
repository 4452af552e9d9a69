"""Search for the highest removal rate of a format that meets a constraint on its quality."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import QualityError
from runtime.kv.compressed import CompressedFormat
from runtime.models.model import Model
from runtime.offline.quality.attention import TeacherForced
from runtime.offline.quality.measure import logits_of
from runtime.offline.quality.metrics import Bootstrap, Summary, compare, summarize

MAX_RATE = 0.75
"""Upper end of the interval that is searched."""


@dataclass(frozen=True)
class Constraint:
    """Bounds on the difference to exact KV; None does not bound.

    Attributes:
        max_perplexity_increase: bound on `Summary.perplexity_change`, 0.01 for 1 %.
        min_fidelity: bound on `Summary.top1`, the share of positions with the same best token.

    Raises:
        QualityError: neither is given, or one is out of range.
    """

    max_perplexity_increase: float | None = None
    min_fidelity: float | None = None

    def __post_init__(self) -> None:
        increase, fidelity = self.max_perplexity_increase, self.min_fidelity
        if increase is None and fidelity is None:
            raise QualityError("a search needs a bound on perplexity or on fidelity")
        if increase is not None and not 0.0 <= increase < math.inf:
            raise QualityError(f"perplexity increase {increase:g} is not a number from 0")
        if fidelity is not None and not 0.0 < fidelity <= 1.0:
            raise QualityError(f"fidelity {fidelity:g} is not in (0, 1]")

    def met_by(self, found: Summary) -> bool:
        """Return whether a measurement is within the bounds; intervals are not considered."""
        increase, fidelity = self.max_perplexity_increase, self.min_fidelity
        return (increase is None or found.perplexity_change <= increase) and (
            fidelity is None or found.top1 >= fidelity
        )


class Evaluator:
    """Compares formats with exact KV on the same texts, as `runtime.offline.quality.measure` does.

    Logits of exact KV are computed once and kept: fp32 `[texts, tokens, vocab]` on the CPU.

    Args:
        model: model on any device, with KV format `dense`.
        texts: int64 `[texts, tokens]`.
    """

    def __init__(self, model: Model, texts: Tensor) -> None:
        self._model = model
        self._texts = texts
        self._exact = [self._logits(text, None) for text in texts]

    def __call__(self, compressed: CompressedFormat) -> Summary:
        """Return the quality of a format, whose tensors are on the device of the model.

        Raises:
            QualityError: logits are not finite.
            KVFormatError: the format decodes values that are not finite.
        """
        scores = [
            compare(exact, self._logits(text, compressed), text)
            for exact, text in zip(self._exact, self._texts, strict=True)
        ]
        return summarize(scores, Bootstrap())

    @torch.inference_mode()
    def _logits(self, text: Tensor, compressed: CompressedFormat | None) -> Tensor:
        forced = TeacherForced(self._model.config, compressed)
        return logits_of(self._model, text, forced).cpu()


@dataclass(frozen=True)
class Trial:
    """One evaluation of a search."""

    rate: float
    quality: Summary
    met: bool


def search_rate(
    evaluate: Callable[[float], Summary],
    constraint: Constraint,
    evaluations: int,
    report: Callable[[Trial], None] = lambda _: None,
) -> float:
    """Return the highest removal rate that meets a constraint, by bisection of 0 to `MAX_RATE`.

    Quality is assumed to fall with the rate. The result is an evaluated rate. The lowest evaluated
    rate that misses the constraint, or `MAX_RATE` if none does, is larger by
    ``MAX_RATE / 2**evaluations``.

    Args:
        evaluate: measures the format with a removal rate.
        evaluations: number of evaluations, at least 1.
        report: called after each evaluation.

    Raises:
        QualityError: no evaluated rate meets the constraint.
    """
    low, high = 0.0, MAX_RATE
    for _ in range(evaluations):
        rate = (low + high) / 2
        quality = evaluate(rate)
        met = constraint.met_by(quality)
        report(Trial(rate, quality, met))
        low, high = (rate, high) if met else (low, rate)
    if not low:
        raise QualityError(f"no removal rate down to {high:g} meets the constraint")
    return low
