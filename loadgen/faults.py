"""Fault injection into a deployment on this machine, such as ``kill prefill at 30s``.

A command can be a fault as well, such as one that cuts a link while it runs. Process ids
come from ``headrace status``. A process that is still stopped when the run ends is continued then.
"""

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from loadgen.clock import Clock
from loadgen.errors import UsageError

_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}
_RUN = "run"
_FAULT = re.compile(
    r"(kill|terminate|stop|run)\s+(\S.*?)\s+at\s+([\d.]+)\s*s?(?:\s+for\s+([\d.]+)\s*s?)?"
)
_NAME = re.compile(r"[\w-]+(\.\d+)?")
_STATUS_LEAD_S = 2.0
"""Seconds before a fault at which `headrace status` is started, because it is slow."""
_POLL_S = 0.1
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        action: ``kill``, ``terminate``, ``stop`` or ``run``.
        process: name of a process, or a role; a role selects its first process. ``decode-0.1`` is
            rank 1 of a worker of several ranks, whose rank 0 is ``decode-0``. For ``run``, it is
            the command, which is a fault for as long as it runs.
        at: time in seconds after the start of the run.
        for_s: seconds between stopping a process and continuing it, or between the start of a
            command and its SIGTERM.
    """

    action: str
    process: str
    at: float
    for_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Parse a fault.

        Raises:
            UsageError: if the syntax is wrong.
        """
        found = _FAULT.fullmatch(text.strip())
        valid = found is not None and (found[1] in ("stop", _RUN)) == (found[4] is not None)
        if found is None or not valid or not (found[1] == _RUN or _NAME.fullmatch(found[2])):
            raise UsageError(
                f"{text}: expected a fault such as 'kill prefill at 30s', 'terminate decode-0 at "
                "5s', 'stop decode at 10s for 2s' or 'run ./cut-link at 5s for 3s'"
            )
        try:
            return cls(found[1], found[2], float(found[3]), float(found[4]) if found[4] else None)
        except ValueError:
            raise UsageError(f"{text}: not a number of seconds") from None

    def __str__(self) -> str:
        duration = "" if self.for_s is None else f" for {self.for_s:g} s"
        return f"{self.action} {self.process}{duration}"


class FaultInjector:
    """Injects faults during a run.

    Attributes:
        log: one entry per fault, as in the summary document; ``failed`` is the reason why a fault
            could not be injected.
    """

    def __init__(self, faults: Sequence[Fault], port: int) -> None:
        self._faults = sorted(faults, key=lambda fault: fault.at)
        self._port = port
        self._stopped: set[int] = set()
        self.log: list[dict[str, Any]] = []

    @classmethod
    def for_target(
        cls, faults: Sequence[Fault], target: str, status_port: int | None
    ) -> "FaultInjector":
        """Return an injector for the deployment of a target, after checking the faults.

        Args:
            target: URL of the deployment's gateway.
            status_port: gateway port of the deployment; if None, the port of ``target``.

        Raises:
            UsageError: the deployment is not on this machine, or has no such process.
        """
        parts = urlsplit(target)
        if faults and parts.hostname not in _LOOPBACK:
            raise UsageError("faults can only be injected into a deployment on this machine")
        made = cls(faults, status_port or parts.port or 80)
        if names := {fault.process for fault in faults if fault.action != _RUN}:
            processes = made._processes()
            for name in names:
                made._pid(name, processes)
        return made

    async def run(self, clock: Clock) -> None:
        """Inject all faults; returns after the last one, or when cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for fault in self._faults:
                    tasks.create_task(self._inject(fault, clock))
        finally:
            self._continue(*self._stopped)

    async def _inject(self, fault: Fault, clock: Clock) -> None:
        try:
            if fault.action == _RUN:
                await _sleep_until(fault.at, clock)
                process = await asyncio.create_subprocess_exec(*shlex.split(fault.process))
                pid = process.pid
            else:
                await _sleep_until(fault.at - _STATUS_LEAD_S, clock)
                processes = await asyncio.to_thread(self._processes)
                await _sleep_until(fault.at, clock)
                pid = self._pid(fault.process, processes)
                os.kill(pid, _SIGNALS[fault.action])
        except asyncio.CancelledError:
            self._log_failure(fault, clock, "the run ended first")
            raise
        except (
            UsageError,
            OSError,
            ValueError,
            subprocess.SubprocessError,
        ) as error:  # recorded, does not end the run
            self._log_failure(fault, clock, str(error))
            return
        entry = {"at": clock(), "what": str(fault), "pid": pid}
        self.log.append(entry)
        if fault.action == _RUN:
            await _end_command(process, fault, entry)
        elif fault.for_s is not None:
            self._stopped.add(pid)
            await asyncio.sleep(fault.for_s)
            self._continue(pid)

    def _log_failure(self, fault: Fault, clock: Clock, why: str) -> None:
        self.log.append({"at": clock(), "what": str(fault), "failed": why})

    def _continue(self, *pids: int) -> None:
        for pid in pids:
            self._stopped.discard(pid)
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # the process has already exited

    def _processes(self) -> dict[str, int]:
        beside = Path(sys.executable).with_name("headrace")
        command = str(beside) if beside.exists() else shutil.which("headrace")
        if command is None:
            raise UsageError("fault injection needs the `headrace` command")
        done = subprocess.run(
            [command, "status", "--json", "--port", str(self._port)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if done.returncode != 0:
            raise UsageError(f"no deployment of `headrace up` on port {self._port}")
        return _with_ranks(**orjson.loads(done.stdout))

    def _pid(self, name: str, processes: dict[str, int]) -> int:
        for process, pid in sorted(processes.items()):
            if process == name or process.rpartition("-")[0] == name:
                return pid
        raise UsageError(f"no process {name}; running: {', '.join(sorted(processes))}")


def _with_ranks(
    processes: dict[str, int], ranks: dict[str, list[int]], **_: object
) -> dict[str, int]:
    """Return the process ids of a deployment, also those of the ranks after the first."""
    others = {
        f"{name}.{rank}": pid for name, pids in ranks.items() for rank, pid in enumerate(pids, 1)
    }
    return processes | others


async def _end_command(
    process: asyncio.subprocess.Process, fault: Fault, entry: dict[str, Any]
) -> None:
    """Send SIGTERM to a command when its time is over, and log an end before it as a failure."""
    try:
        async with asyncio.timeout(fault.for_s):
            entry["failed"] = f"the command ended with exit code {await process.wait()}"
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _sleep_until(at: float, clock: Clock) -> None:
    """Sleep in short steps, because the run may restart the clock."""
    while (left := at - clock()) > 0:  # noqa: ASYNC110 - no event to wait for
        await asyncio.sleep(min(left, _POLL_S))
