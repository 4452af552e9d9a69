"""Saturation, the knee, and the next rate of a sweep."""

import pytest

from loadgen.knee import Point, knee, next_rate


def point(
    rate: float,
    latency: float | None = 1.0,
    *,
    growth: float = 0.0,
    failures: float = 0.0,
    attainment: float | None = None,
) -> Point:
    return Point(rate, rate - growth, growth, failures, latency, attainment)


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
    assert found is not None
    assert found["rate"] == 5.0
    assert knee(points[-1:], 0.9) is None
    assert knee([point(1, None)], 0.9) is None


def test_knee_with_objectives_is_the_highest_attaining_rate() -> None:
    shares = {1.0: 1.0, 2.0: 0.95, 4.0: 0.9, 8.0: 0.6}
    points = [point(rate, attainment=share) for rate, share in shares.items()]
    points.append(point(16, growth=9, attainment=1.0))
    assert (knee(points, 0.9) or {})["rate"] == 4.0
    assert (knee(points, 0.5) or {})["rate"] == 8.0
    assert knee(points[3:], 0.9) is None


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
