"""Fault injection: syntax and effects on processes."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from loadgen.clock import Clock
from loadgen.errors import UsageError
from loadgen.faults import Fault, FaultInjector


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill prefill at 30s", Fault("kill", "prefill", 30.0)),
        (" terminate decode-1 at 0.5 s ", Fault("terminate", "decode-1", 0.5)),
        ("kill decode-0.1 at 5s", Fault("kill", "decode-0.1", 5.0)),
        ("stop router at 2 for 1.5s", Fault("stop", "router", 2.0, 1.5)),
        ("run ./cut 'a link' at 3s for 2s", Fault("run", "./cut 'a link'", 3.0, 2.0)),
    ],
)
def test_fault_syntax(text: str, fault: Fault) -> None:
    assert Fault.parse(text) == fault


@pytest.mark.parametrize(
    "text",
    ["", "kill at 3s", "kill prefill", "stop decode at 3s", "kill decode at 3s for 2s",
     "burn decode at 3s", "kill decode at 3.3.3s", "kill decode at 3s; stop decode at 4s",
     "run ./cut at 3s", "kill a decode at 3s", "kill decode-0.x at 3s"],
)  # fmt: skip
def test_invalid_faults_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Fault.parse(text)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Start two sleeping processes in place of those reported by ``headrace status``."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = {name: subprocess.Popen(command) for name in ("decode-0", "prefill-0")}
    pids = {name: process.pid for name, process in started.items()}
    monkeypatch.setattr(FaultInjector, "_processes", lambda self: pids)
    yield pids
    for process in started.values():
        process.kill()
        process.wait()


TARGET = "http://127.0.0.1:8000/v1"


def state(pid: int) -> str:
    with suppress(psutil.NoSuchProcess):
        return str(psutil.Process(pid).status())
    return "gone"


async def test_faults_happen_at_their_times(processes: dict[str, int]) -> None:
    faults = [Fault("kill", "prefill", 4.0), Fault("stop", "decode-0", 0.1, 3.0)]
    clock = Clock()
    injector = FaultInjector.for_target(faults, TARGET, None)
    running = asyncio.create_task(injector.run(clock))
    async with asyncio.timeout(30):
        await _until_state(processes["decode-0"], psutil.STATUS_STOPPED)
        await running
        await _until_state(processes["prefill-0"], psutil.STATUS_ZOMBIE)
    assert state(processes["decode-0"]) != psutil.STATUS_STOPPED
    assert [one["what"] for one in injector.log] == ["stop decode-0 for 3 s", "kill prefill"]
    assert all(one["at"] >= at for one, at in zip(injector.log, (0.1, 4.0), strict=True))


async def test_stopped_process_continues_when_the_run_ends(processes: dict[str, int]) -> None:
    injector = FaultInjector.for_target([Fault("stop", "decode", 0.0, 60.0)], TARGET, None)
    running = asyncio.create_task(injector.run(Clock()))
    async with asyncio.timeout(10):
        await _until_state(processes["decode-0"], psutil.STATUS_STOPPED)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert state(processes["decode-0"]) != psutil.STATUS_STOPPED


async def test_command_runs_for_its_time(tmp_path: Path) -> None:
    """Commands get SIGTERM at their end, or when the run ends; an early end is a failure."""
    script, ended = tmp_path / "wait", tmp_path / "ended"
    script.write_text(
        f"#!/bin/sh\ntrap 'echo $1 >> {ended}; exit' TERM\nwhile :; do sleep 0.1; done\n"
    )
    script.chmod(0o755)
    faults = [
        Fault("run", f"{script} first", 0.0, 3.0),
        Fault("run", f"{script} second", 0.0, 60.0),
        Fault("run", "false", 0.0, 60.0),
        Fault("run", "/no/such/command", 0.0, 60.0),
    ]
    injector = FaultInjector.for_target(faults, TARGET, None)
    running = asyncio.create_task(injector.run(Clock()))
    async with asyncio.timeout(30):
        while not ended.exists():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.read_text() == "first\nsecond\n"
    failed = {one["what"]: one["failed"] for one in injector.log if "failed" in one}
    assert failed.pop("run false for 60 s") == "the command ended with exit code 1"
    assert "No such file" in failed.pop("run /no/such/command for 60 s")
    assert not failed


async def test_missing_process_is_logged_as_failed(processes: dict[str, int]) -> None:
    injector = FaultInjector.for_target([Fault("kill", "decode", 0.2)], TARGET, None)
    processes["decode-0"] = 2**22 + 1  # above the maximum pid
    await injector.run(Clock())
    assert "failed" in injector.log[0]


async def test_fault_after_the_end_of_the_run_is_logged_as_failed(
    processes: dict[str, int],
) -> None:
    injector = FaultInjector.for_target([Fault("kill", "decode", 60.0)], TARGET, None)
    running = asyncio.create_task(injector.run(Clock()))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [(one["what"], one["failed"]) for one in injector.log] == [
        ("kill decode", "the run ended first")
    ]
    assert state(processes["decode-0"]) != psutil.STATUS_ZOMBIE


async def _until_state(pid: int, expected: str) -> None:
    while state(pid) != expected:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)


def test_remote_target_and_unknown_process_are_refused(processes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="on this machine"):
        FaultInjector.for_target([Fault("kill", "decode", 1.0)], "http://example.org/v1", None)
    with pytest.raises(UsageError, match="no process gateway; running: decode-0, prefill-0"):
        FaultInjector.for_target([Fault("kill", "gateway", 1.0)], TARGET, None)
    assert not FaultInjector.for_target([], "http://example.org/v1", None).log


def test_ranks_are_named_after_their_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"port": 8000, "processes": {"decode-0": 5}, "ranks": {"decode-0": [6, 7]}}
    status = subprocess.CompletedProcess([], 0, stdout=json.dumps(document))
    monkeypatch.setattr("loadgen.faults.subprocess.run", lambda *_, **__: status)
    FaultInjector.for_target([Fault("kill", "decode-0.2", 1.0)], TARGET, None)
    with pytest.raises(UsageError, match=r"running: decode-0, decode-0\.1, decode-0\.2$"):
        FaultInjector.for_target([Fault("kill", "decode-0.3", 1.0)], TARGET, None)


def test_missing_deployment_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="on port 9"):
        FaultInjector.for_target([Fault("kill", "decode", 1.0)], "http://127.0.0.1:9/v1", None)
