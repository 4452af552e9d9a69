"""Fixtures of workers that transfer KV."""

from collections.abc import AsyncIterator

import pytest

from tests.services.workers import Site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    opened = Site()
    yield opened
    await opened.close()
