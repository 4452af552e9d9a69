"""A run ends early only if the required attainment cannot be reached any more."""

import pytest

from loadgen.early_end import EarlyEnd
from loadgen.measures import TPOT, TTFT, Objective, Window
from loadgen.record import Failure, Record

OBJECTIVES = (Objective(TTFT, 0.5), Objective(TPOT, 0.1))
WINDOW = Window(0.0, 10.0)


def record(number: int, **fields: object) -> Record:
    made = Record(number, due=float(number), input_tokens=5, wanted_tokens=2, sent=float(number))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def answered(number: int, first: float, gap: float) -> Record:
    times = [number + first, number + first + gap]
    return record(number, times=times, counts=[1, 1], ended=times[-1])


def early_end(attainment: float | None) -> EarlyEnd:
    return EarlyEnd(attainment, WINDOW, OBJECTIVES)


def test_misses_are_counted_against_all_requests_of_the_window() -> None:
    records = [answered(0, 1.0, 0.0), *(record(number, sent=None) for number in range(1, 10))]
    assert not early_end(0.9).is_out_of_reach(records, now=2.0)
    records[1] = answered(1, 1.0, 0.0)
    assert early_end(0.9).is_out_of_reach(records, now=2.0)
    assert not early_end(None).is_out_of_reach(records, now=2.0)


@pytest.mark.parametrize(
    ("one", "missed"),
    [
        (answered(0, 0.4, 0.09), False),
        (answered(0, 0.6, 0.09), True),
        (answered(0, 0.4, 0.2), True),
        (record(0, failure=Failure.RESET, ended=0.1), True),
        (record(0, sent=None), False),
        (record(0, cancelled=True, ended=0.1), False),
        (record(0, times=[0.6], counts=[1]), True),
        (record(0, times=[0.4], counts=[1]), False),
    ],
)
def test_one_request(one: Record, missed: bool) -> None:
    assert early_end(1.0).is_out_of_reach([one], now=9.0) == missed


def test_waiting_request_misses_once_its_bound_has_passed() -> None:
    assert not early_end(1.0).is_out_of_reach([record(0)], now=0.5)
    assert early_end(1.0).is_out_of_reach([record(0)], now=0.6)


def test_requests_outside_of_the_window_do_not_count() -> None:
    late = [answered(number, 1.0, 0.0) for number in range(10, 15)]
    assert not early_end(1.0).is_out_of_reach(late, now=20.0)
