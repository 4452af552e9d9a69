"""Means over the recent steps of a worker."""

import pytest

from services.common.pace import RECENT_S, RECENT_STEPS, UNCOUNTED_STEPS, MeasuredStep, PaceMeter


def meter_of(*seconds: float, start: float = 0.0) -> PaceMeter:
    """Return a meter with steps of one sequence, after those that are not counted."""
    meter = PaceMeter()
    for _ in range(UNCOUNTED_STEPS):
        meter.add(step(100.0), start)
    for duration in seconds:
        meter.add(step(duration), start)
    return meter


def step(seconds: float, tokens: int = 1, decoded: int = 1) -> MeasuredStep:
    return MeasuredStep(seconds, tokens, context=50 * tokens, decoded=decoded)


def test_pace_is_unknown_until_a_step_is_counted() -> None:
    meter = meter_of()
    assert meter.pace() is None
    assert meter.pace(current=step(3.0)) is None
    assert meter.inter_token_s == 0.0


def test_means_of_duration_and_size() -> None:
    meter = meter_of(0.25)
    meter.add(step(0.75, tokens=101, decoded=0), 1.0)
    found = meter.pace(idle_s=2.0)
    assert found is not None
    assert (found.step_s, found.tokens, found.context, found.idle_s) == (0.5, 51, 50 * 51, 2.0)
    assert meter.inter_token_s == 0.25, "a step without running sequences has no token of them"


def test_old_steps_are_forgotten_once_there_are_newer_ones() -> None:
    meter = meter_of(*[1.0] * RECENT_STEPS, start=10.0)
    pace = meter.pace(idle_s=1000.0)
    assert pace is not None
    assert pace.step_s == 1.0
    meter.add(step(0.5), 10.0 + RECENT_S + 1)
    assert meter.inter_token_s == 0.5
    for _ in range(RECENT_STEPS):
        meter.add(step(0.25), 100.0)
    assert meter.inter_token_s == 0.25


def test_step_in_progress_counts_once_it_takes_longer_than_the_mean() -> None:
    meter = meter_of(0.1, 0.1, 0.1)

    def step_s(seconds: float) -> float:
        pace = meter.pace(current=step(seconds))
        assert pace is not None
        return pace.step_s

    assert step_s(0.09) == pytest.approx(0.1)
    assert step_s(10.1) == pytest.approx(2.6)
    assert meter.inter_token_s == pytest.approx(0.1), "the step has not ended"


def test_time_that_completes_the_last_step_is_part_of_it() -> None:
    meter = meter_of(0.1, 0.1)
    meter.extend(0.2)
    pace = meter.pace()
    assert pace is not None
    assert pace.step_s == pytest.approx(0.2)
