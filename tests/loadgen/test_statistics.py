"""Distributions and confidence intervals."""

import numpy as np
import pytest

from loadgen.statistics import PERCENTILES, Distribution, Interval


def test_distribution_of_five_values() -> None:
    found = Distribution.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found is not None
    assert (found.count, found.mean, found.minimum, found.maximum) == (5, 3.0, 1.0, 5.0)
    assert found.deviation == pytest.approx(2.5**0.5)
    assert found.percentile(50.0) == 3.0
    assert found.percentile(90.0) == pytest.approx(4.6)
    assert len(found.percentiles) == len(PERCENTILES)


def test_distribution_of_no_value_and_of_one_value() -> None:
    assert Distribution.of([]) is None
    one = Distribution.of([2.0])
    assert one is not None
    assert (one.deviation, one.percentile(99.9)) == (0.0, 2.0)


def test_interval_covers_the_mean_at_its_confidence_level() -> None:
    draws = np.random.default_rng(5).normal(3.0, 2.0, (4000, 4))
    hits = 0
    for row in draws:
        found = Interval.of(row, level=0.9)
        hits += found.low <= 3.0 <= found.high
    assert hits / len(draws) == pytest.approx(0.9, abs=0.02)


def test_interval_of_three_values() -> None:
    """The t quantile t(0.975, 2) is 4.3027; the standard error of 1, 2, 3 is 1 / sqrt(3)."""
    found = Interval.of([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - 2.0 == pytest.approx(4.30265 / 3**0.5, rel=1e-5)
    alone = Interval.of([1.0])
    assert alone.high == float("inf")
    assert alone.clipped(0.0, 9.0) == alone
    assert (found.clipped(0.0, 4.0).low, found.clipped(0.0, 4.0).high) == (0.0, 4.0)
