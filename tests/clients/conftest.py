"""One deployment for all tests of clients."""

from collections.abc import Iterator

import pytest

from tests.harness.deployment import Running, deployed


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    with deployed() as deployment:
        yield deployment
