"""A new calibration is advised if recent escapes far exceed the calibration's."""

from services.transfer.drift import EscapeDrift

MILLION = 1_000_000


def test_rates_are_averages_of_added_segments() -> None:
    drift = EscapeDrift()
    assert (drift.rate, drift.expected, drift.recalibrate) == (0, 0, False)
    drift.add(MILLION, 10_000, 0.02)
    drift.add(MILLION, 30_000, 0.02)
    assert 0.0199 < drift.rate < 0.021
    assert abs(drift.expected - 0.02) < 1e-9


def test_calibration_is_advised_after_enough_excess_escapes() -> None:
    drift = EscapeDrift()
    drift.add(MILLION // 2, MILLION // 20, 0.02)
    assert not drift.recalibrate
    drift.add(2 * MILLION, MILLION // 5, 0.02)
    assert drift.recalibrate
    drift = EscapeDrift()
    for _ in range(10):
        drift.add(MILLION, 40_000, 0.02)
    assert not drift.recalibrate


def test_old_segments_lose_their_weight() -> None:
    drift = EscapeDrift()
    drift.add(20 * MILLION, 4 * MILLION, 0.0)
    assert drift.recalibrate
    for _ in range(100):
        drift.add(MILLION, 0, 0.0)
    assert not drift.recalibrate
    assert drift.rate < 0.001
