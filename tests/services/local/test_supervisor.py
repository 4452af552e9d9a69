"""The supervisor restarts processes that exit, and gives up on those that cannot start."""

import asyncio
import errno
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from services.local.lock import ProcessIdentity
from services.local.supervisor import (
    EXIT_SETTINGS_ERROR,
    MAX_START_FAILURES,
    ProcessSpec,
    ServiceFailed,
    Supervisor,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

ROOT = Path(__file__).parents[3]
ROUTER = ProcessSpec("router", "router", ("--port", "0"))
INVALID = ProcessSpec("router", "router", ("--port", "-1"))


async def _pid(supervisor: Supervisor, *, other_than: int | None = None) -> int:
    for _ in range(600):
        pid = supervisor.pids.get("router")
        if pid is not None and pid != other_than:
            return pid
        await asyncio.sleep(0.05)
    raise AssertionError("the process was not started")


def _with_package(folder: Path, source: str) -> ProcessSpec:
    """Return a router process whose `quart` package has this source."""
    folder.mkdir()
    (folder / "quart.py").write_text(source)
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    return replace(ROUTER, environment={"PYTHONPATH": path})


async def test_killed_process_is_restarted_and_stopped_with_the_supervisor(tmp_path: Path) -> None:
    seen: list[dict[str, int]] = []
    supervisor = Supervisor([ROUTER], tmp_path, on_change=seen.append)
    running = asyncio.create_task(supervisor.run())
    first = await _pid(supervisor)
    os.kill(first, signal.SIGKILL)
    second = await _pid(supervisor, other_than=first)
    await asyncio.sleep(0.05)  # `on_change` is called by another task
    assert seen == [{"router": first}, {"router": second}]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not psutil.pid_exists(second)


def _with_child(folder: Path) -> ProcessSpec:
    """Return a process that starts another one, prints its id, and ignores SIGTERM."""
    return _with_package(
        folder,
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
        "time.sleep(60)",
    )


async def _children(log: Path, count: int) -> list[int]:
    """Wait for the ids of children in a log."""
    while len(pids := log.read_bytes().split()) < count:  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.05)
    return list(map(int, pids))


@pytest.mark.long
async def test_process_that_hangs_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP stops all threads. The other process, which works, is left alone."""
    monkeypatch.setattr("services.local.liveness.PERIOD_S", 0.1)
    monkeypatch.setattr("services.local.liveness.SILENT_S", 5.0)
    monkeypatch.setattr("services.local.liveness.START_S", 60.0)
    monkeypatch.setattr("services.local.liveness.TICK_S", 0.1)
    other = replace(ROUTER, name="other")
    supervisor = Supervisor([ROUTER, other], tmp_path, on_change=lambda _: None)
    running = asyncio.create_task(supervisor.run())
    first = await _pid(supervisor)
    while b'"ready"' not in (tmp_path / "router.log").read_bytes():  # noqa: ASYNC110 - a file
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # the first report follows
    working = supervisor.pids["other"]
    os.kill(first, signal.SIGSTOP)
    second = await _pid(supervisor, other_than=first)
    assert not psutil.pid_exists(first)
    assert supervisor.pids["other"] == working
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not psutil.pid_exists(second)


async def test_kill_ends_a_stop_that_waits(tmp_path: Path) -> None:
    supervisor = Supervisor([ROUTER], tmp_path, on_change=lambda _: None)
    running = asyncio.create_task(supervisor.run())
    pid = await _pid(supervisor)
    os.kill(pid, signal.SIGSTOP)  # does not handle SIGTERM
    running.cancel()
    await asyncio.sleep(0)
    supervisor.send_signal(signal.SIGKILL)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(("drain_s", "grace_s", "code"), [(30, 0.5, -signal.SIGKILL), (1, 30, 0)])
async def test_process_that_drains_is_killed_after_its_grace_period(
    tmp_path: Path, drain_s: int, grace_s: float, code: int
) -> None:
    spec = _with_package(
        tmp_path / "package",
        "import os, signal, time\n"
        "def drain(*_):\n"
        f"    time.sleep({drain_s})\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, drain)\n"
        "print('0', flush=True)\n"
        "time.sleep(60)",
    )
    supervisor = Supervisor([replace(spec, grace_s=grace_s)], tmp_path, on_change=lambda _: None)
    running = asyncio.create_task(supervisor.run())
    await _pid(supervisor)
    await _children(tmp_path / "router.log", 1)
    process = supervisor._processes["router"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert process.returncode == code


async def test_no_process_outlives_the_service_that_has_started_it(tmp_path: Path) -> None:
    """Neither when the service is restarted, nor when it is killed during a stop."""
    spec = _with_child(tmp_path / "package")
    log = tmp_path / "router.log"
    supervisor = Supervisor([spec], tmp_path, on_change=lambda _: None)
    running = asyncio.create_task(supervisor.run())
    first = await _pid(supervisor)
    (child,) = await _children(log, 1)
    os.kill(first, signal.SIGKILL)
    await _pid(supervisor, other_than=first)
    assert ProcessIdentity.of(child) is None
    _, child = await _children(log, 2)
    running.cancel()
    await asyncio.sleep(0)
    supervisor.send_signal(signal.SIGKILL)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ProcessIdentity.of(child) is None


async def test_processes_do_not_import_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "typer.py").write_text("raise SystemExit('planted')")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'proto'}")
    monkeypatch.chdir(planted)
    supervisor = Supervisor([ROUTER], tmp_path, on_change=lambda _: None)
    running = asyncio.create_task(supervisor.run())
    await _pid(supervisor)
    log_file = tmp_path / "router.log"
    while not (content := log_file.read_bytes()):  # noqa: ASYNC110 - a file
        await asyncio.sleep(0.05)
    assert b"planted" not in content
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_service_with_invalid_settings_is_not_restarted(tmp_path: Path) -> None:
    seen: list[dict[str, int]] = []
    supervisor = Supervisor([INVALID], tmp_path, on_change=seen.append)
    with pytest.raises(ServiceFailed, match="cannot start with its settings") as failure:
        await supervisor.run()
    assert failure.value.exit_code == EXIT_SETTINGS_ERROR
    assert len(seen) == 1
    assert "port" in failure.value.log_file.read_text()


async def test_service_with_a_missing_package_is_not_restarted(tmp_path: Path) -> None:
    spec = _with_package(tmp_path / "packages", "import nothing_of_this_name")
    supervisor = Supervisor([spec], tmp_path, on_change=lambda _: None)
    with pytest.raises(ServiceFailed) as failure:
        await supervisor.run()
    assert "a package is missing" in failure.value.log_file.read_text()
    assert "nothing_of_this_name" in failure.value.log_file.read_text()


async def test_service_that_crashes_before_ready_stops_the_deployment(tmp_path: Path) -> None:
    crashing = _with_package(tmp_path / "packages", "raise RuntimeError('broken on purpose')")
    healthy = replace(ROUTER, name="healthy")
    seen: list[dict[str, int]] = []
    supervisor = Supervisor([crashing, healthy], tmp_path, on_change=seen.append)
    async with asyncio.timeout(90):
        with pytest.raises(ServiceFailed, match=f"exited {MAX_START_FAILURES} times") as failure:
            await supervisor.run()
    assert failure.value.name == "router"
    assert failure.value.exit_code == 1
    assert len({pids["router"] for pids in seen if "router" in pids}) == MAX_START_FAILURES
    assert "broken on purpose" in failure.value.log_file.read_text()
    assert not psutil.pid_exists(seen[-1]["healthy"])


async def test_exits_after_ready_never_stop_the_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.local.supervisor.MAX_BACKOFF_S", 0.01)
    supervisor = Supervisor([ROUTER], tmp_path, on_change=lambda _: None)
    running = asyncio.create_task(supervisor.run())
    supervisor.mark_ready()
    pid = None
    for _ in range(MAX_START_FAILURES + 1):
        pid = await _pid(supervisor, other_than=pid)
        os.kill(pid, signal.SIGKILL)
    await _pid(supervisor, other_than=pid)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize(
    ("code", "failures", "message"),
    [
        (2, 1, "router exited with code 2: it cannot start with its settings"),
        (1, 3, "router exited with code 1; it exited 3 times before the deployment was ready"),
        (-9, 3, "router was ended by SIGKILL; it exited 3 times before the deployment was ready"),
    ],
)
def test_failure_message_has_the_exit_code(code: int, failures: int, message: str) -> None:
    assert str(ServiceFailed("router", code, failures, Path("router.log"))) == message


async def test_logs_of_the_previous_deployment_are_kept(tmp_path: Path) -> None:
    log_file = tmp_path / "router.log"
    log_file.write_text("the previous deployment")
    supervisor = Supervisor([INVALID], tmp_path, on_change=lambda _: None)
    with pytest.raises(ServiceFailed):
        await supervisor.run()
    assert "the previous deployment" not in log_file.read_text()
    assert (tmp_path / "router.log.1").read_text() == "the previous deployment"


async def test_full_disk_does_not_stop_the_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the state nor a log can be written at first."""
    monkeypatch.setattr("services.local.supervisor.RETRY_S", 0.01)
    saved: list[dict[str, int]] = []
    failures = [OSError(errno.ENOSPC, "No space left on device") for _ in range(3)]

    def save(pids: dict[str, int]) -> None:
        if failures:
            raise failures.pop()
        saved.append(pids)

    (tmp_path / "router.log").mkdir()  # cannot be opened
    supervisor = Supervisor([ROUTER], tmp_path, on_change=save)
    monkeypatch.setattr(Path, "replace", lambda path, target: target)
    running = asyncio.create_task(supervisor.run())
    pid = await _pid(supervisor)
    for _ in range(500):
        if saved:
            break
        await asyncio.sleep(0.01)
    assert saved == [{"router": pid}]
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_process_that_cannot_be_created_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = asyncio.create_subprocess_exec
    failures = [OSError(errno.EAGAIN, "Resource temporarily unavailable")] * 2

    async def fail_at_first(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        if failures:
            raise failures.pop()
        return await create(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail_at_first)
    monkeypatch.setattr("services.local.supervisor.MAX_BACKOFF_S", 0.01)
    supervisor = Supervisor([ROUTER], tmp_path, on_change=lambda _: None)
    running = asyncio.create_task(supervisor.run())
    await _pid(supervisor)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_log_of_a_running_process_is_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.local.supervisor.MAX_LOG_BYTES", 50)
    monkeypatch.setattr("services.local.supervisor.ROTATE_PERIOD_S", 0.01)
    supervisor = Supervisor([ROUTER], tmp_path, on_change=lambda _: None)
    running = asyncio.create_task(supervisor.run())
    rotated, log_file = tmp_path / "router.log.1", tmp_path / "router.log"
    for _ in range(1200):
        with suppress(FileNotFoundError):  # it is replaced by every rotation
            if b"ready" in rotated.read_bytes():
                break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("the log was not rotated")
    no_rotation = Mock()
    monkeypatch.setattr("services.local.supervisor.rotate", no_rotation)
    while not no_rotation.called:  # noqa: ASYNC110 - until the last rotation has ended
        await asyncio.sleep(0.01)
    os.kill(await _pid(supervisor), signal.SIGTERM)  # it logs that it stops
    for _ in range(3000):
        if b"stopping" in (content := log_file.read_bytes()):
            break
        await asyncio.sleep(0.01)
    assert b"stopping" in content
    assert b"\0" not in content, "the process appends at the new end"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_reload_is_passed_on_and_ends_no_process(tmp_path: Path) -> None:
    spec = replace(ROUTER, environment={"HEADRACE_ROUTER_LOG_FORMAT": "json"})
    supervisor = Supervisor([spec], tmp_path, on_change=lambda pids: None)
    running = asyncio.create_task(supervisor.run())
    pid = await _pid(supervisor)
    async with asyncio.timeout(60):
        while "SIGHUP: reading files again" not in (tmp_path / "router.log").read_text():
            supervisor.send_signal(signal.SIGHUP)  # also while the process is starting
            await asyncio.sleep(0.05)
    assert supervisor.pids == {"router": pid}
    assert psutil.pid_exists(pid)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
