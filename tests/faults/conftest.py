"""The deployment that most fault tests share, and the seed."""

from collections.abc import Iterator

import pytest

from tests.harness.reference import SEED
from tests.harness.trial import Trial, trial


def pytest_report_header() -> str:
    return f"FAULT_SEED={SEED}"


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """Two prefill and two decode workers. Every test leaves them idle and ready."""
    with trial(tmp_path_factory.mktemp("points"), "--prefill", "2", "--decode", "2") as running:
        yield running
