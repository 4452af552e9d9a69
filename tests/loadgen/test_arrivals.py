"""Arrival processes: distribution of gaps, and reproducibility by seed."""

from itertools import islice, pairwise

import numpy as np
import pytest
from scipy import stats

from loadgen.arrivals import Arrivals, Constant, Gamma, Poisson, Ramp, Trace
from loadgen.errors import UsageError

SEEDS = range(20)
ALPHA = 0.001 / len(SEEDS)


def gaps(arrivals: Arrivals, count: int, seed: int) -> np.ndarray:
    times = list(islice(arrivals.times(seed), count))
    return np.diff([0.0, *times])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        (Poisson(40.0), stats.expon(scale=1 / 40)),
        (Gamma(40.0, 0.3), stats.gamma(0.3, scale=1 / 12)),
        (Gamma(2.0, 4.0), stats.gamma(4.0, scale=1 / 8)),
    ],
    ids=["poisson", "gamma-0.3", "gamma-4"],
)
def test_gaps_follow_their_distribution(
    arrivals: Arrivals, expected: stats.rv_continuous, seed: int
) -> None:
    found = gaps(arrivals, 4000, seed)
    assert stats.kstest(found, expected.cdf).pvalue > ALPHA
    # Consecutive gaps are independent.
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / np.sqrt(len(found))


def test_distribution_test_rejects_another_shape() -> None:
    found = gaps(Poisson(40.0), 4000, 0)
    assert stats.kstest(found, stats.gamma(0.8, scale=1 / 32).cdf).pvalue < ALPHA


def test_constant_times_do_not_drift() -> None:
    assert list(islice(Constant(8.0).times(1), 5)) == [0.0, 0.125, 0.25, 0.375, 0.5]
    assert next(islice(Constant(3.0).times(1), 3_000, None)) == 1000.0


@pytest.mark.parametrize(("low", "high"), [(5.0, 60.0), (60.0, 5.0), (20.0, 20.0)])
def test_ramp_changes_the_rate_linearly(low: float, high: float) -> None:
    """Request counts per second, summed over many seeds, match the linear rate."""
    ramp = Ramp(low, high, 10.0)
    seeds = 200
    seconds = 10
    counts = np.zeros(seconds + 2)
    for seed in range(seeds):
        times = [at for at in islice(ramp.times(seed), 2000) if at < seconds + 2]
        counts += np.histogram(times, bins=np.arange(seconds + 3))[0]
    middle = low + (high - low) * (np.arange(seconds) + 0.5) / seconds
    expected = np.concatenate([middle, [high, high]]) * seeds
    assert np.all(np.abs(counts - expected) < 4.5 * np.sqrt(expected))


def test_trace_is_replayed_at_its_speed() -> None:
    assert list(Trace([7.0, 3.0, 4.0], speed=2.0).times(0)) == [0.0, 0.5, 2.0]


@pytest.mark.parametrize("arrivals", [Poisson(3.0), Gamma(3.0, 0.5), Ramp(1.0, 9.0, 5.0)], ids=str)
def test_times_depend_on_the_seed_only(arrivals: Arrivals) -> None:
    first, again, other = (list(islice(arrivals.times(seed), 50)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(before <= after for before, after in pairwise(first))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_rates_are_refused(rate: float) -> None:
    for make in (Poisson, Gamma, Constant, lambda rate: Ramp(rate, 1.0, 1.0)):
        with pytest.raises(UsageError, match="rate"):
            make(rate)
