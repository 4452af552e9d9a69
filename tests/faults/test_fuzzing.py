"""A short run of mutated messages on each port; ``python -m tests.programs.fuzzing`` sends more."""

import pytest

from tests.programs.fuzzing.campaign import PORTS, attack

pytestmark = pytest.mark.slow

MESSAGES = 320


@pytest.mark.few(3)
@pytest.mark.parametrize("port", PORTS)
async def test_mutated_messages_crash_leak_and_change_nothing(port: str) -> None:
    report = await attack(port, MESSAGES, seed=0)
    assert not report.faults, report
    assert report.outcomes.total() >= MESSAGES // 2
