"""Queueing formulas, with numbers from textbooks or that are easy to check by hand."""

import math
from random import Random

import pytest

from services.sizing.queueing import Waiting, erlang_c, poisson_mean, waiting


@pytest.mark.parametrize(
    ("servers", "load", "probability"),
    [
        (1, 0.3, 0.3),  # M/M/1: the utilization
        (2, 1.0, 1 / 3),  # M/M/2: 2 ρ² / (1 + ρ)
        (2, 1.6, 2 * 0.8**2 / 1.8),  # M/M/2, as above
        (10, 8.0, 0.409),  # tables of Erlang C
    ],
)
def test_erlang_c(servers: int, load: float, probability: float) -> None:
    assert erlang_c(servers, load) == pytest.approx(probability, abs=5e-4)


def test_wait_for_one_server_is_that_of_pollaczek_and_khinchine() -> None:
    """λ E[S²] / (2 (1 - ρ)) with S of 1 or 3 s: 0.25 * 5 / (2 * 0.5) = 1.25 s."""
    found = waiting(0.25, [1.0, 3.0], 1)
    assert found.utilization == 0.5
    assert found.probability * found.mean == pytest.approx(1.25)


def test_fixed_service_times_halve_the_wait_of_exponential_ones() -> None:
    """M/D/1 at half load: half a service time on average, ρ / (2 (1 - ρ))."""
    found = waiting(5.0, [0.1], 1)
    assert found.probability * found.mean == pytest.approx(0.05)
    assert found.quantile(0.95) == pytest.approx(0.1 * math.log(10))
    assert found.quantile(0.5) == 0.0  # half of the requests do not wait


def test_full_servers_have_no_finite_wait() -> None:
    for rate in (2.0, 3.0):
        found = waiting(rate, [1.0], 2)
        assert found == Waiting(rate / 2, 1.0, math.inf)
        assert found.quantile(0.5) == math.inf


@pytest.mark.parametrize("servers", [1, 2, 8])
def test_waiting_agrees_with_a_simulation(servers: int) -> None:
    """One queue for k servers, exponential service: 200,000 requests at 80 % utilization."""
    random = Random(servers)
    free = [0.0] * servers
    clock = 0.0
    waits = []
    for _ in range(200_000):
        clock += random.expovariate(0.8 * servers)
        first = min(range(servers), key=free.__getitem__)
        waits.append(max(0.0, free[first] - clock))
        free[first] = max(clock, free[first]) + random.expovariate(1.0)
    points = [-math.log(1 - (at + 0.5) / 2000) for at in range(2000)]
    expected = waiting(0.8 * servers, points, servers)
    assert expected.utilization == pytest.approx(0.8, rel=0.01)
    mean = sum(waits) / len(waits)
    assert expected.probability * expected.mean == pytest.approx(mean, rel=0.1)
    quantile = sorted(waits)[int(0.95 * len(waits))]
    assert expected.quantile(0.95) == pytest.approx(quantile, rel=0.1)


def test_poisson_mean_has_the_given_quantile() -> None:
    """A mean of 16 has the standard deviation 4, and the 95 % quantile 16 + 1.645 * 4 = 22.58."""
    assert poisson_mean(22.58, 0.95) == pytest.approx(16, abs=0.01)
    assert poisson_mean(100, 0.5) == pytest.approx(100)
