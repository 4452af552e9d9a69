"""Workers that transfer KV, and the unhandled errors of an event loop."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.services.workers import Site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    opened = Site()
    yield opened
    await opened.close()


@pytest.fixture
async def unhandled() -> list[dict[str, Any]]:
    """Return a list to which the event loop adds errors that no code handles.

    Errors of tasks and futures are added when these are collected as garbage.
    """
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    return errors
