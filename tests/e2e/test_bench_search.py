"""Search of the serving benchmark for the highest rate within objectives."""

import pytest

from tests.programs.serving_bench.cases.search import Bracket, search


@pytest.mark.parametrize("start", [0.5, 8.0, 100.0])
@pytest.mark.parametrize("capacity", [0.3, 7.9, 21.0])
def test_bracket_contains_the_capacity(start: float, capacity: float) -> None:
    *_, (_, bracket) = search(lambda rate: rate <= capacity, start, tolerance=0.05)
    assert bracket.passed is not None
    assert bracket.failed is not None
    assert bracket.passed <= capacity < bracket.failed
    assert bracket.failed / bracket.passed <= 1.05


def test_each_rate_is_measured_once() -> None:
    asked: list[float] = []

    def passes(rate: float) -> bool:
        asked.append(rate)
        return rate <= 13

    measured = [rate for rate, _ in search(passes, 8.0, tolerance=0.05)]
    assert measured == asked
    assert len(set(asked)) == len(asked)
    assert asked[:2] == [8.0, 16.0]


def test_search_ends_when_no_rate_fails_or_none_passes() -> None:
    *_, (_, bracket) = search(lambda rate: True, 8.0, tolerance=0.05, most=100)
    assert bracket.failed is None
    *_, (_, bracket) = search(lambda rate: False, 8.0, tolerance=0.05, most=100)
    assert bracket.passed is None


def test_number_of_rates_is_limited() -> None:
    assert len(list(search(lambda rate: rate < 13, 8.0, tolerance=1e-9, most=5))) == 5


def test_noise_cannot_widen_the_bracket() -> None:
    bracket = Bracket(passed=8.0, failed=16.0)
    bracket.add(4.0, passes=True)
    bracket.add(32.0, passes=False)
    assert bracket == Bracket(passed=8.0, failed=16.0)
