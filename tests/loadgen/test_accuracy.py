"""What `python -m tests.loadgen.accuracy` measures, at a rate that a busy machine has, too."""

import pytest

from tests.loadgen.accuracy import TOKENS, Row, measure


@pytest.mark.parametrize("rpc", [False, True])
def test_medians_are_near_the_truth(rpc: bool) -> None:
    row = measure(20, 5, rpc=rpc)
    assert row.requests > 30
    assert 0 <= row.ttft[0] < 0.02
    assert abs(row.itl[0]) < 0.002
    assert row.tokens_a_second > 10 * TOKENS
    assert 0 < row.cpu < 1.5


def test_true_is_what_is_within_two_milliseconds_or_two_percent() -> None:
    assert Row(1, 1, (0.002, -0.001), (0.0, 0.002), 1, 1).true
    assert not Row(1, 1, (0.002, 0.0021), (0.0, 0.0), 1, 1).true
    assert not Row(1, 1, (0.0, 0.0), (-0.0021, 0.0), 1, 1).true
