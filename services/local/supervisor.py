"""Starts the processes of a deployment, restarts those that die, and stops them all."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

log = structlog.get_logger()

CANNOT_START = 2  # a service's exit code when its settings are wrong: a restart would not help
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 10.0
STABLE_S = 30.0  # a process that lived so long starts again without having to wait
GRACE_S = 35.0  # a service's own `drain_s`, 30 s by default, and some more
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProcessSpec:
    """One service process: ``headrace <service> <arguments>``."""

    name: str
    service: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


class ServiceFailed(Exception):
    """A service refuses to start as it was told; its log says why."""

    def __init__(self, name: str, log_file: Path) -> None:
        super().__init__(f"{name} cannot start")
        self.name = name
        self.log_file = log_file


class Supervisor:
    """Keeps the processes of a deployment alive until it is told to stop.

    Args:
        folder: each process writes its log to ``<folder>/<name>.log``; what one wrote for the
            deployment before this one is in ``<name>.log.1``.
        on_change: called whenever a process was started, with all pids.
    """

    def __init__(
        self,
        specs: list[ProcessSpec],
        folder: Path,
        *,
        on_change: Callable[[dict[str, int]], None],
    ) -> None:
        self._specs = specs
        self._folder = folder
        self._on_change = on_change
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = False

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    async def run(self) -> None:
        """Until cancelled; then all processes are stopped, the workers after the gateway.

        Raises:
            ServiceFailed: a service cannot start as it was told.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for former in self._folder.glob("*.log"):
            former.replace(former.with_suffix(".log.1"))
        try:
            async with asyncio.TaskGroup() as keepers:
                for spec in self._specs:
                    keepers.create_task(self._keep(spec))
        except* ServiceFailed as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._stop_all()

    async def _keep(self, spec: ProcessSpec) -> None:
        backoff = FIRST_BACKOFF_S
        while not self._stopping:
            started = time.monotonic()
            process = await self._spawn(spec)
            code = await process.wait()
            if self._stopping:
                return
            if code == CANNOT_START:
                raise ServiceFailed(spec.name, self._log_file(spec.name))
            lived = time.monotonic() - started
            backoff = FIRST_BACKOFF_S if lived > STABLE_S else min(MAX_BACKOFF_S, backoff * 2)
            log.warning("process died", process=spec.name, code=code, restart_in_s=backoff)
            await asyncio.sleep(backoff)

    async def _spawn(self, spec: ProcessSpec) -> asyncio.subprocess.Process:
        with self._log_file(spec.name).open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.cli",
                spec.service,
                *spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env={**os.environ, **spec.environment},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._processes[spec.name] = process
        log.info("process started", process=spec.name, pid=process.pid)
        self._on_change(self.pids)
        return process

    def _log_file(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    async def _stop_all(self) -> None:
        """The gateway first, so that nothing new comes; then the rest; who lingers is killed."""
        self._stopping = True
        for first in (True, False):
            names = [spec.name for spec in self._specs if (spec.service == "gateway") is first]
            stopping = (self._processes[name] for name in names if name in self._processes)
            await asyncio.gather(*(_stop(process, grace_s=GRACE_S) for process in stopping))


async def _stop(process: asyncio.subprocess.Process, *, grace_s: float) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _die_with_parent() -> None:
    """In the child: a supervisor that is killed takes its processes with it (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
