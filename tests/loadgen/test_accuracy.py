"""Accuracy of the load generator at a low rate, with tolerances for a busy machine.

`python -m tests.loadgen.accuracy` measures the accuracy at higher rates.
"""

import pytest

from tests.loadgen.accuracy import Row, measure


@pytest.mark.long
@pytest.mark.parametrize("rpc", [False, True])
def test_median_errors_are_small(rpc: bool) -> None:
    row = measure(20, 5, ("--most-lag", "60"), rpc=rpc)
    assert row.requests > 30
    assert 0 <= row.ttft[0] < 0.25
    assert abs(row.itl[0]) < 0.01
    assert row.tokens_per_second > 0
    assert row.cpu > 0


def test_row_is_accurate_within_two_milliseconds_or_two_percent() -> None:
    assert Row(1, 1, (0.002, -0.001), (0.0, 0.002), 1, 1).accurate
    assert not Row(1, 1, (0.002, 0.0021), (0.0, 0.0), 1, 1).accurate
    assert not Row(1, 1, (0.0, 0.0), (-0.0021, 0.0), 1, 1).accurate
