"""Validity of runs: reasons and remedies."""

import pytest

from loadgen.axis import RATE
from loadgen.statistics import Distribution
from loadgen.validity import Invalid, invalid, invalid_points, not_prepared


def found(lag_s: float, *, cores: float | None = None, closed: bool = False) -> Invalid:
    result = invalid(Distribution.of([lag_s]), 0.01, cores=cores, closed=closed)
    assert result is not None
    return result


def test_lag_within_the_limit_is_valid() -> None:
    assert invalid(Distribution.of([0.0099]), 0.01, cores=1.0, closed=False) is None


@pytest.mark.parametrize(
    ("cores", "closed", "remedy"),
    [
        (
            0.35,
            False,
            "Other programs, such as the server itself, delayed the load generator: run it",
        ),
        (None, False, "Other programs, such as the server itself"),
        (0.97, False, "The load generator used a whole core, and cannot use more: lower the rate"),
        (0.97, True, "Requests were not prepared in time: give --requests"),
    ],
)
def test_remedy_depends_on_the_cause(cores: float | None, closed: bool, remedy: str) -> None:
    late = found(0.0234, cores=cores, closed=closed)
    assert late.reason == (
        "the load generator was late: p99 dispatch lag is 23.4 ms, the limit is 10 ms"
    )
    assert late.remedy.startswith(remedy)
    assert "--most-lag accepts more lag" in late.remedy


def test_run_without_requests_is_invalid() -> None:
    nothing = invalid(None, 0.01, cores=0.1, closed=False)
    assert nothing is not None
    assert "--duration" in nothing.remedy


def test_unprepared_requests_name_the_cause() -> None:
    assert "503" in not_prepared("the tokenizer answered 503").reason


def test_statements_on_points_name_load_and_runs_and_each_remedy_once() -> None:
    valid = {"rate": 1.0, "seeds": [0, 1], "invalid": None}
    late = valid | {"invalid": "late", "remedy": "Wait.", "invalid_runs": 1}
    old = {"rate": 2.5, "seeds": [0], "invalid": "late"}  # from a version without remedies
    assert invalid_points([valid, late, late | {"rate": 2.0}, old], RATE) == [
        "At 1 request per second, in 1 of 2 runs: late.",
        "At 2 requests per second, in 1 of 2 runs: late.",
        "At 2.5 requests per second, in 1 of 1 run: late.",
        "Wait.",
    ]
