"""Time without progress, of a measuring process that may be stopped itself."""

from types import SimpleNamespace

import pytest

from services.worker import stall
from services.worker.stall import Stall


class Clock:
    """Time of the measuring process, and processor time of the measured one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.used_s = 1.0
        monkeypatch.setattr(stall, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(stall, "_processor_s", lambda _: self.used_s)

    def after(self, seconds: float, measure: Stall, step_s: float) -> float:
        self.now += seconds
        return measure.seconds(step_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def measure(*, by_processor: bool = False, pause_s: float) -> Stall:
    return Stall(lambda: "self", by_processor=by_processor, pause_s=pause_s)


def test_pause_of_the_measuring_process_does_not_count(clock: Clock) -> None:
    stalled = measure(pause_s=0.5)
    assert clock.after(0.25, stalled, 0.0) == 0
    assert clock.after(0.25, stalled, 0.25) == 0.25
    assert clock.after(3.0, stalled, 3.25) == 0.75
    assert clock.after(0.25, stalled, 3.5) == 1.0


def test_stall_is_measured_if_every_measurement_is_late(clock: Clock) -> None:
    stalled = measure(pause_s=0.5)
    late = [clock.after(2.0, stalled, 2.0 * count) for count in range(1, 5)]
    assert late == [0.5, 1.0, 1.5, 2.0]


def test_new_step_begins_at_zero(clock: Clock) -> None:
    stalled = measure(pause_s=0.5)
    clock.after(0.5, stalled, 0.5)
    assert clock.after(0.5, stalled, 0.125) == 0.125


def test_processor_time_is_progress(clock: Clock) -> None:
    stalled = measure(by_processor=True, pause_s=0.5)
    assert clock.after(0.25, stalled, 0.25) == 0
    assert clock.after(0.25, stalled, 0.5) == 0.25
    clock.used_s += 1
    assert clock.after(0.25, stalled, 0.75) == 0
    assert clock.after(0.25, stalled, 1.0) == 0.25
