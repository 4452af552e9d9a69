"""Saturation, the knee, and the next rate of a sweep."""

import pytest

from loadgen.axis import CONCURRENCY, RATE
from loadgen.knee import Point, knee, knee_statement, next_rate


def point(
    rate: float,
    latency: float | None = 1.0,
    *,
    growth: float = 0.0,
    failures: float = 0.0,
    attainment: float | None = None,
    valid: bool = True,
) -> Point:
    return Point(rate, rate - growth, growth, failures, latency, attainment, valid)


def test_rate_is_saturated_by_growth_or_failures() -> None:
    assert not point(10, growth=0.9).saturated
    assert point(10, growth=1.1).saturated
    assert not point(10, failures=0.04).saturated
    assert point(10, failures=0.06).saturated


def test_knee_without_objectives_maximizes_power() -> None:
    """An M/M/1 queue with service rate 10 has latency 1 / (10 - rate) and maximum power at 5."""
    points = [point(rate, 1 / (10 - rate)) for rate in (1.0, 3.0, 4.0, 5.0, 6.0, 9.0)]
    points.append(point(20, 0.001, growth=10))
    found = knee(points, 0.9)
    assert found.load == 5.0
    assert not found.lower_bound


def test_knee_with_objectives_is_the_highest_attaining_rate() -> None:
    shares = {1.0: 1.0, 2.0: 0.95, 4.0: 0.9, 8.0: 0.6}
    points = [point(rate, attainment=share) for rate, share in shares.items()]
    points.append(point(16, growth=9, attainment=1.0))
    assert knee(points, 0.9).load == 4.0
    assert knee(points, 0.5).load == 8.0


def test_invalid_points_are_not_considered() -> None:
    """Four of five points are invalid, among them those with the highest attainment and power."""
    rates = (1.0, 2.0, 4.0, 3.0, 2.5)
    for attainment in (1.0, None):
        points = [point(r, 1 / r, attainment=attainment, valid=r == 1) for r in rates]
        found = knee(points, 0.9)
        assert found.load == 1.0
        assert found.lower_bound, "higher rates have no valid measurement"
    assert knee([point(1, valid=False)], 0.9).load is None


def test_knee_at_the_highest_valid_rate_is_a_lower_bound() -> None:
    points = [point(1, attainment=1.0), point(2, attainment=0.95)]
    assert knee(points, 0.9).lower_bound
    assert not knee([*points, point(4, attainment=0.5)], 0.9).lower_bound
    assert not knee([*points, point(4, growth=3, attainment=0.5)], 0.9).lower_bound


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ([point(1, valid=False)], "no rate has a valid measurement"),
        ([point(1, growth=1)], "each valid rate is saturated: measure lower ones"),
        ([point(1, attainment=0.5)], "no rate has at least 90 % of requests within"),
        ([point(1, None)], "no request was answered"),
    ],
)
def test_missing_knee_is_explained(points: list[Point], why: str) -> None:
    found = knee(points, 0.9)
    assert found.load is None
    assert found.why.startswith(why)


def test_statement_has_the_singular_and_says_if_the_knee_may_be_higher() -> None:
    one = {"knee": knee([point(1), point(2, 9.0)], 0.9).as_json(RATE)}
    assert knee_statement(one, RATE) == (
        "Knee at 1 request per second", "the highest ratio of throughput to mean latency",
    )  # fmt: skip
    more = {"knee": knee([point(4)], 0.9, CONCURRENCY).as_json(CONCURRENCY)}
    title, why = knee_statement(more, CONCURRENCY)
    assert title == "Knee at 4 requests in flight or more"
    assert why.endswith("no higher concurrency has a valid measurement")
    none = {"knee": None, "no_knee": "each valid rate is saturated"}
    assert knee_statement(none, RATE) == ("No knee", "each valid rate is saturated")


@pytest.mark.parametrize(
    ("measured", "left", "expected"),
    [
        ([(1, False)], 2, 2.0),
        ([(1, False), (2, False)], 2, 4.0),
        ([(1, False), (2, False), (4, True)], 2, 3.0),
        ([(1, False), (2, False), (4, True), (3, True)], 1, 2.5),
        ([(1, False), (2, False), (4, True), (3, False)], 1, 3.5),
        ([(1, False), (2, False), (4, True)], 0, None),
        ([(3, True)], 2, 1.5),
    ],
)
def test_rates_double_and_are_then_bisected(
    measured: list[tuple[int, bool]], left: int, expected: float | None
) -> None:
    points = [point(rate, growth=rate * over) for rate, over in measured]
    assert next_rate(points, left) == expected
    late = [point(rate, valid=not over) for rate, over in measured]
    assert next_rate(late, left) == expected, "the load generator limits the sweep"
