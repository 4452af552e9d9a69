"""Faults: what they are called, and what they do to processes."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from loadgen.clock import Clock
from loadgen.errors import UsageError
from loadgen.faults import Fault, Faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill prefill at 30s", Fault("kill", "prefill", 30.0)),
        (" terminate decode-1 at 0.5 s ", Fault("terminate", "decode-1", 0.5)),
        ("stop router at 2 for 1.5s", Fault("stop", "router", 2.0, 1.5)),
    ],
)
def test_faults_as_users_write_them(text: str, fault: Fault) -> None:
    assert Fault.parse(text) == fault


@pytest.mark.parametrize(
    "text",
    ["", "kill at 3s", "kill prefill", "stop decode at 3s", "kill decode at 3s for 2s",
     "burn decode at 3s", "kill decode at 3.3.3s", "kill decode at 3s; stop decode at 4s"],
)  # fmt: skip
def test_what_are_no_faults(text: str) -> None:
    with pytest.raises(UsageError):
        Fault.parse(text)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Two that only sleep, as a deployment that ``headrace status`` tells of."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = {name: subprocess.Popen(command) for name in ("decode-0", "prefill-0")}
    pids = {name: process.pid for name, process in started.items()}
    monkeypatch.setattr(Faults, "_processes", lambda self: pids)
    yield pids
    for process in started.values():
        process.kill()
        process.wait()


TARGET = "http://127.0.0.1:8000/v1"


def state(pid: int) -> str:
    with suppress(psutil.NoSuchProcess):
        return str(psutil.Process(pid).status())
    return "gone"


async def test_they_happen_at_their_times(processes: dict[str, int]) -> None:
    faults = [Fault("kill", "prefill", 0.3), Fault("stop", "decode-0", 0.1, 0.4)]
    clock, doing = Clock(), Faults.at(faults, TARGET, None)
    running = asyncio.create_task(doing.run(clock))
    await asyncio.sleep(0.25)
    assert state(processes["decode-0"]) == psutil.STATUS_STOPPED
    assert state(processes["prefill-0"]) != psutil.STATUS_ZOMBIE
    async with asyncio.timeout(10):
        await running
    assert state(processes["decode-0"]) != psutil.STATUS_STOPPED
    assert state(processes["prefill-0"]) == psutil.STATUS_ZOMBIE
    assert [one["what"] for one in doing.done] == ["stop decode-0 for 0.4 s", "kill prefill"]
    assert [one["at"] for one in doing.done] == pytest.approx([0.1, 0.3], abs=0.1)


async def test_what_is_stopped_goes_on_when_the_run_ends(processes: dict[str, int]) -> None:
    doing = Faults.at([Fault("stop", "decode", 0.0, 60.0)], TARGET, None)
    running = asyncio.create_task(doing.run(Clock()))
    async with asyncio.timeout(10):
        await _until_stopped(processes["decode-0"])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert state(processes["decode-0"]) != psutil.STATUS_STOPPED


async def test_a_process_that_is_gone_is_told(processes: dict[str, int]) -> None:
    doing = Faults.at([Fault("kill", "decode", 0.2)], TARGET, None)
    processes["decode-0"] = 2**22 + 1  # no pid is that high
    await doing.run(Clock())
    assert "failed" in doing.done[0]


async def test_what_a_run_was_too_short_for_is_told(processes: dict[str, int]) -> None:
    doing = Faults.at([Fault("kill", "decode", 60.0)], TARGET, None)
    running = asyncio.create_task(doing.run(Clock()))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [(one["what"], one["failed"]) for one in doing.done] == [
        ("kill decode", "the run was over before")
    ]
    assert state(processes["decode-0"]) != psutil.STATUS_ZOMBIE


async def _until_stopped(pid: int) -> None:
    while state(pid) != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.01)


def test_only_a_deployment_here_that_has_the_process(processes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="on this machine"):
        Faults.at([Fault("kill", "decode", 1.0)], "http://example.org/v1", None)
    with pytest.raises(UsageError, match="no process gateway; there are decode-0, prefill-0"):
        Faults.at([Fault("kill", "gateway", 1.0)], TARGET, None)
    assert not Faults.at([], "http://example.org/v1", None).done


def test_without_a_deployment_it_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="listens on port 9"):
        Faults.at([Fault("kill", "decode", 1.0)], "http://127.0.0.1:9/v1", None)
