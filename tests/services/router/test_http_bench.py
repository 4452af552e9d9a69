"""The benchmark of placements over HTTP runs with the real router and client."""

import pytest

from services.router.http_bench import measure


@pytest.mark.slow
def test_placements_over_http_are_measured_with_their_floor() -> None:
    cost = measure(placements_per_s=100, seconds=0.5)
    assert cost.placements_per_s > 0
    assert cost.p99_us >= cost.p50_us > 0
    assert cost.echo_p50_us > 0
