"""Reports of a process to its supervisor: only through the right pipe, only while it works."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from services.common.liveness import VARIABLE, LivenessReports, ReportPipe
from services.common.probes import Probes

PERIOD_S = 0.01


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """The reading and the writing end of a pipe."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def pipe_of(writing: int) -> ReportPipe:
    return ReportPipe(writing, os.fstat(writing).st_ino, PERIOD_S)


async def reported(reading: int) -> None:
    """Wait for a report."""
    while True:
        try:
            os.read(reading, 1 << 16)
        except BlockingIOError:
            await asyncio.sleep(PERIOD_S)
        else:
            return


async def not_ready() -> str | None:
    return None


def test_inherited_pipe_is_found(ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipe_of(ends[1])
    for name, value in pipe.environment.items():
        monkeypatch.setenv(name, value)
    assert ReportPipe.inherited() == pipe


@pytest.mark.parametrize("value", ["", "x", "1000000 1 1", "{descriptor} 1 1", "1 {inode} 1"])
def test_variable_without_its_pipe_is_ignored(
    ends: tuple[int, int], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may inherit the variable, but not the descriptor."""
    pipe = pipe_of(ends[1])
    monkeypatch.setenv(VARIABLE, value.format(descriptor=pipe.descriptor, inode=pipe.inode))
    assert ReportPipe.inherited() is None


@pytest.mark.timeout(30)
async def test_reports_stop_while_health_fails(ends: tuple[int, int]) -> None:
    failing: str | None = None
    checked = asyncio.Event()

    async def failure() -> str | None:
        checked.set()
        return failing

    reports = LivenessReports(pipe_of(ends[1]), Probes(not_ready, failure))
    await reported(ends[0])
    failing = "stalled"
    checked.clear()
    await checked.wait()  # the report of the previous check is written
    with suppress(BlockingIOError):
        os.read(ends[0], 1 << 16)
    checked.clear()
    await checked.wait()
    with pytest.raises(BlockingIOError):
        os.read(ends[0], 1)
    failing = None
    await reported(ends[0])
    reports.stop()


@pytest.mark.timeout(30)
async def test_reports_continue_after_an_exception_of_the_check(ends: tuple[int, int]) -> None:
    broken = True

    async def failure() -> str | None:
        if broken:
            raise ValueError("broken check")
        return None

    with capture_logs() as logs:
        reports = LivenessReports(pipe_of(ends[1]), Probes(not_ready, failure))
        for _ in range(3):
            await reported(ends[0])
        broken = False
        await reported(ends[0])
        reports.stop()
    assert [record["event"] for record in logs] == [
        "health check failed; liveness reports continue"
    ]
