"""Files with secrets are read again periodically and on SIGHUP; metrics about them."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.common import secret_files
from services.common.secret_files import reloading
from services.common.secret_metrics import SecretMetrics

LIMIT_S = 30


class Files:
    """Files that record how they were read."""

    kind = "api_keys"
    expires_at: float | None = None

    def __init__(self) -> None:
        self.failure: str | None = None
        self.loaded_at = 5.0
        self.reads: list[bool] = []
        self.error: Exception | None = None

    def refresh(self, *, at_once: bool = False) -> None:
        self.reads.append(at_once)
        if self.error is not None:
            raise self.error


async def until_read(files: Files, at_once: bool) -> None:
    async with asyncio.timeout(LIMIT_S):
        while at_once not in files.reads:  # noqa: ASYNC110 - the files have no event
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def sighup() -> Iterator[None]:
    """Ignore SIGHUP, which would otherwise end the process of the tests if it is not handled."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, previous)


async def test_sighup_reads_all_files_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_files, "PERIOD_S", 3600)
    several = [Files(), Files()]
    with capture_logs() as logs:
        async with reloading(several):
            os.kill(os.getpid(), signal.SIGHUP)
            for files in several:
                await until_read(files, at_once=True)
    assert [entry["files"] for entry in logs] == [["api_keys", "api_keys"]]


async def test_files_are_read_periodically_also_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secret_files, "PERIOD_S", 0.001)
    files = Files()
    files.error = RuntimeError("broken")
    with capture_logs() as logs:
        async with reloading([files]):
            await until_read(files, at_once=False)
            files.reads.clear()
            await until_read(files, at_once=False)
    assert logs[0]["log_level"] == "error"


async def test_sighup_does_not_end_a_service_without_files() -> None:
    with capture_logs() as logs:
        async with reloading([]):
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(LIMIT_S):
                while not logs:  # noqa: ASYNC110 - logs have no event
                    await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
    assert len(logs) == 1


def test_metrics_follow_the_files() -> None:
    registry = CollectorRegistry()
    files = Files()
    files.expires_at = 9.0
    SecretMetrics(registry).observe([files], None)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"headrace_secret_files_{name}", {"kind": "api_keys"})

    names = ("failed", "loaded_timestamp_seconds", "expiry_timestamp_seconds")
    assert [value(name) for name in names] == [0, 5, 9]
    files.failure = "not valid"
    files.loaded_at = 6.0
    files.expires_at = 10.0
    assert [value(name) for name in names] == [1, 6, 10]
