"""Supervisor of a deployment's processes: starts them, restarts those that end or hang."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from services.common.interpreter import headrace_command
from services.common.signals import prepare_service_process
from services.local.liveness import Liveness
from services.local.logs import open_log, previous_log, rotate
from services.local.sessions import end_session

log = structlog.get_logger()

EXIT_SETTINGS_ERROR = 2
"""Exit code of a service with an error in its settings. Such a service is not restarted."""
MAX_START_FAILURES = 3
"""All processes are stopped if one exits this many times before the deployment is ready."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 10.0
STABLE_S = 30.0
"""A process that ran longer than this time, in seconds, restarts after the first backoff."""
_KILL_S = 20.0
"""Maximum time for the end of processes that were killed, seconds."""
RETRY_S = 5.0
"""Time in seconds after which `on_change` is called again if it failed."""
MAX_LOG_BYTES = 64 << 20
"""Size above which a log is rotated."""
ROTATE_PERIOD_S = 10.0


@dataclass(frozen=True)
class ProcessSpec:
    """One service process: ``headrace <service> <arguments>``.

    Attributes:
        name: unique name within the deployment.
        service: gateway, router, prefill or decode.
        arguments: command-line flags of the service.
        environment: variables added to the supervisor's own.
        grace_s: time in seconds to stop, after which the process is killed.
    """

    name: str
    service: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    grace_s: float = 35.0


def stop_s(specs: Iterable[ProcessSpec]) -> float:
    """Return the maximum time that `Supervisor.run` takes to stop processes, seconds."""
    return 2 * max(spec.grace_s for spec in specs) + _KILL_S


class ServiceFailed(Exception):
    """A service cannot start.

    Attributes:
        name: name of the process.
        exit_code: last exit code of the process; the negative signal number if a signal ended it.
        failures: number of exits of the process before the deployment was ready.
        log_file: log of the process.
    """

    def __init__(self, name: str, exit_code: int, failures: int, log_file: Path) -> None:
        end = f"exited with code {exit_code}"
        if exit_code < 0:
            end = f"was ended by {signal.Signals(-exit_code).name}"
        if exit_code == EXIT_SETTINGS_ERROR:
            end += ": it cannot start with its settings"
        elif failures > 1:
            end += f"; it exited {failures} times before the deployment was ready"
        super().__init__(f"{name} {end}")
        self.name = name
        self.exit_code = exit_code
        self.failures = failures
        self.log_file = log_file


class Supervisor:
    """Keeps the processes of a deployment running until it is cancelled.

    A process that exits is restarted, with a growing delay. One that hangs is killed first, see
    `services.local.liveness`. The supervisor gives up if a service reports an error in its
    settings, or if it exits `MAX_START_FAILURES` times before `mark_ready`.

    Args:
        specs: the processes.
        folder: log folder. Each process writes to ``<folder>/<name>.log``. The log of the previous
            deployment, or the last `MAX_LOG_BYTES` before a rotation, are kept as ``<name>.log.1``.
        on_change: callback that gets `pids` after processes were started. If it raises OSError, for
            example on a full disk, it is called again after `RETRY_S`.
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
        self._sessions: set[int] = set()
        self._changed = asyncio.Event()
        self._ready = False
        self._stopping = False

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each process, by name. A process that exited keeps its last id."""
        return {name: process.pid for name, process in self._processes.items()}

    def mark_ready(self) -> None:
        """Record that the deployment is ready. From then on, only a settings error ends it."""
        self._ready = True

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes.

        On SIGHUP, they read their files with secrets again. SIGKILL ends them at once, without
        letting running requests finish.
        """
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(number)

    async def run(self) -> None:
        """Run the processes until cancelled, then stop the gateway, and the others after it.

        Raises:
            ServiceFailed: if a service cannot start; all other processes are stopped by then.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for previous in self._folder.glob("*.log"):
            previous.replace(previous_log(previous))
        try:
            async with asyncio.TaskGroup() as keepers:
                for spec in self._specs:
                    keepers.create_task(self._keep_running(spec))
                keepers.create_task(self._report_changes())
                keepers.create_task(self._rotate_logs())
        except ExceptionGroup as errors:
            # Not `except*`, whose errors Python before 3.11.4 puts into a group.
            if failures := errors.subgroup(ServiceFailed):
                raise failures.exceptions[0] from None
            raise
        finally:
            await self._stop_all()

    async def _keep_running(self, spec: ProcessSpec) -> None:
        backoff = FIRST_BACKOFF_S
        failures = 0
        while not self._stopping:
            started = time.monotonic()
            code = await self._run_once(spec)
            if self._stopping:
                return
            if not self._ready:
                failures += 1
            if code == EXIT_SETTINGS_ERROR or (not self._ready and failures >= MAX_START_FAILURES):
                raise ServiceFailed(spec.name, code, failures, self._log_file(spec.name))
            run_s = time.monotonic() - started
            backoff = FIRST_BACKOFF_S if run_s > STABLE_S else min(MAX_BACKOFF_S, backoff * 2)
            log.warning("process exited", process=spec.name, code=code, restart_in_s=backoff)
            await asyncio.sleep(backoff)

    async def _run_once(self, spec: ProcessSpec) -> int:
        """Start a process and return its exit code; 1 if the system cannot create it now."""
        try:
            with Liveness() as liveness:
                process = await self._spawn(spec, liveness)
                watching = asyncio.create_task(_kill_when_hung(spec.name, process, liveness))
                try:
                    code = await process.wait()
                finally:
                    watching.cancel()
            await self._end_session(process.pid)
            return code
        except OSError as error:
            log.warning("process not started", process=spec.name, error=str(error))
            return 1

    async def _spawn(self, spec: ProcessSpec, liveness: Liveness) -> asyncio.subprocess.Process:
        with open_log(self._log_file(spec.name)) as log_file:
            process = await asyncio.create_subprocess_exec(
                *headrace_command(spec.service, *spec.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env={**os.environ, **spec.environment, **liveness.pipe.environment},
                pass_fds=[liveness.pipe.descriptor],
                start_new_session=True,
                preexec_fn=prepare_service_process,
            )
        liveness.inherited()
        self._processes[spec.name] = process
        self._sessions.add(process.pid)
        log.info("process started", process=spec.name, pid=process.pid)
        self._changed.set()
        return process

    async def _report_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                self._on_change(self.pids)
            except OSError as error:
                log.warning("state not saved", error=str(error), retry_in_s=RETRY_S)
                self._changed.set()
                await asyncio.sleep(RETRY_S)

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.sleep(ROTATE_PERIOD_S)
            for spec in self._specs:
                try:
                    await asyncio.to_thread(rotate, self._log_file(spec.name), MAX_LOG_BYTES)
                except OSError as error:
                    log.warning("log not rotated", process=spec.name, error=str(error))

    def _log_file(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    async def _stop_all(self) -> None:
        """Stop the gateway first, so that no new requests arrive, then all other processes."""
        self._stopping = True
        for gateways in (True, False):
            await asyncio.gather(
                *(
                    _stop(self._processes[spec.name], grace_s=spec.grace_s)
                    for spec in self._specs
                    if (spec.service == "gateway") is gateways and spec.name in self._processes
                )
            )
        await asyncio.gather(*map(self._end_session, list(self._sessions)))

    async def _end_session(self, leader: int) -> None:
        """End what a process that has ended leaves behind, once."""
        await end_session(leader)
        self._sessions.discard(leader)


async def _kill_when_hung(
    name: str, process: asyncio.subprocess.Process, liveness: Liveness
) -> None:
    """End a process that hangs. SIGKILL also ends one that is stopped or blocks signals."""
    silent_s = await liveness.silence()
    log.warning("process hangs", process=name, pid=process.pid, silent_s=round(silent_s))
    process.kill()


async def _stop(process: asyncio.subprocess.Process, *, grace_s: float) -> None:
    """Send SIGTERM, and SIGKILL after the grace period."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
