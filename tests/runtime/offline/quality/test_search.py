"""Search for a removal rate that meets a constraint."""

import pytest
import torch

from runtime.errors import QualityError
from runtime.offline.quality.measure import describe, measure
from runtime.offline.quality.metrics import Summary
from runtime.offline.quality.search import MAX_RATE, Constraint, Evaluator, Trial, search_rate
from tests.runtime.offline.quality.formats import Identity, Int8, Scaled
from tests.runtime.tiny import CONFIG, prompt_of, tiny_model


def summary(change: float, top1: float) -> Summary:
    return Summary(100, 0.0, 0.0, top1, 10.0, change, change, change)


def quality_at(rate: float) -> Summary:
    """Perplexity rises by a tenth of the rate, and fidelity falls by the rate."""
    return summary(rate / 10, 1 - rate)


@pytest.mark.parametrize(
    ("constraint", "limit"),
    [
        (Constraint(max_perplexity_increase=0.03), 0.3),
        (Constraint(min_fidelity=0.9), 0.1),
        (Constraint(max_perplexity_increase=0.03, min_fidelity=0.9), 0.1),
        (Constraint(max_perplexity_increase=0.5), MAX_RATE),
    ],
)
def test_search_approaches_the_highest_rate_that_meets_the_constraint(
    constraint: Constraint, limit: float
) -> None:
    trials: list[Trial] = []
    found = search_rate(quality_at, constraint, 9, trials.append)
    assert limit - MAX_RATE / 2**9 <= found <= limit
    assert len(trials) == 9
    assert found == max(trial.rate for trial in trials if trial.met)
    assert all(trial.met == (trial.rate <= limit) for trial in trials)


def test_search_without_a_suitable_rate_fails() -> None:
    with pytest.raises(QualityError, match=r"no removal rate down to 0\.09375 meets"):
        search_rate(lambda _: summary(0.02, 1.0), Constraint(max_perplexity_increase=0.01), 3)


@pytest.mark.parametrize(
    "bounds",
    [{}, {"max_perplexity_increase": -0.1}, {"min_fidelity": 0.0}, {"min_fidelity": 1.01}],
)
def test_constraints_out_of_range_are_rejected(bounds: dict[str, float]) -> None:
    with pytest.raises(QualityError):
        Constraint(**bounds)


def test_evaluator_agrees_with_the_quality_command() -> None:
    model = tiny_model()
    texts = torch.tensor([prompt_of(200), prompt_of(200, seed=1)])
    evaluator = Evaluator(model, texts)
    inputs = describe("tiny", "tiny-0", "random", texts)
    for made in (Int8(CONFIG), Scaled(CONFIG)):
        [result] = measure(model, {"x": made}, texts, inputs)
        assert evaluator(made) == result.quality
    assert evaluator(Identity(CONFIG)).perplexity_change == 0.0
    assert evaluator(Scaled(CONFIG)).kl_mean > evaluator(Int8(CONFIG)).kl_mean > 0.0
