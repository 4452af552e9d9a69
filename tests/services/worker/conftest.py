"""Fixtures of workers that run in the process of the test."""

import asyncio

import pytest

from services.worker import process


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return the event that SIGTERM sets. The worker changes no settings of this process."""
    event = asyncio.Event()
    monkeypatch.setattr(process, "stop_on_signals", lambda: event)
    monkeypatch.setattr(process, "freeze_loaded", lambda: None)
    monkeypatch.setattr(process, "set_switch_interval", lambda: None)
    return event
