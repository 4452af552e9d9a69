"""The supervisor restarts what dies, gives up on what cannot start, and leaves nothing behind."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.local.supervisor import ProcessSpec, ServiceFailed, Supervisor

pytestmark = pytest.mark.timeout(60)

ROUTER = ProcessSpec("router", "router", ("--port", "0"))
WRONG = ProcessSpec("router", "router", ("--port", "-1"))


async def _pid(supervisor: Supervisor, *, other_than: int | None = None) -> int:
    for _ in range(300):
        pid = supervisor.pids.get("router")
        if pid is not None and pid != other_than:
            return pid
        await asyncio.sleep(0.05)
    raise AssertionError("the process was not started")


async def test_a_killed_process_comes_back_and_all_end_with_the_supervisor(tmp_path: Path) -> None:
    seen: list[dict[str, int]] = []
    supervisor = Supervisor([ROUTER], tmp_path, on_change=seen.append)
    running = asyncio.create_task(supervisor.run())
    first = await _pid(supervisor)
    os.kill(first, signal.SIGKILL)
    second = await _pid(supervisor, other_than=first)
    assert seen == [{"router": first}, {"router": second}]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not psutil.pid_exists(second)


async def test_a_service_that_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    supervisor = Supervisor([WRONG], tmp_path, on_change=lambda _: None)
    with pytest.raises(ServiceFailed) as failure:
        await supervisor.run()
    assert "port" in failure.value.log_file.read_text()


async def test_a_service_without_its_packages_is_not_started_again(tmp_path: Path) -> None:
    broken = tmp_path / "packages"
    broken.mkdir()
    (broken / "quart.py").write_text("import nothing_of_this_name")
    spec = replace(ROUTER, environment={"PYTHONPATH": str(broken)})
    supervisor = Supervisor([spec], tmp_path, on_change=lambda _: None)
    with pytest.raises(ServiceFailed) as failure:
        await supervisor.run()
    assert "a package is missing" in failure.value.log_file.read_text()
    assert "nothing_of_this_name" in failure.value.log_file.read_text()


async def test_logs_are_of_this_deployment_and_the_former_ones_stay(tmp_path: Path) -> None:
    former = tmp_path / "router.log"
    former.write_text("the deployment before")
    supervisor = Supervisor([WRONG], tmp_path, on_change=lambda _: None)
    with pytest.raises(ServiceFailed):
        await supervisor.run()
    assert "the deployment before" not in former.read_text()
    assert (tmp_path / "router.log.1").read_text() == "the deployment before"
