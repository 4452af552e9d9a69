"""The router's app as a fixture."""

import math
from collections.abc import AsyncIterator

import pytest

from services.router.app import build_dispatcher, create_app
from services.router.settings import RouterSettings
from tests.services.router.app import TOKEN, Clock, Router


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    settings = RouterSettings.model_validate(
        {
            "cluster_token": TOKEN,
            "seed": 0,
            "max_waiting": 2,
            "retry_after_s": 7,
            "max_body_bytes": 4096,
            "tick_s": 0.001,
        }
    )
    clock = Clock()
    dispatcher = build_dispatcher(settings, now=-math.inf)
    app = create_app(settings, dispatcher, clock=clock)
    async with app.test_app():
        yield Router(app, dispatcher, clock)
