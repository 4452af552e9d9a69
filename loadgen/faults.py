"""Faults of a deployment on this machine, at times of a run: ``kill prefill at 30s``.

Which processes there are is asked of ``headrace status``. A process that is stopped goes on at the
latest when the run ends.
"""

import asyncio
import os
import re
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
_FAULT = re.compile(
    r"(kill|terminate|stop)\s+([\w-]+)\s+at\s+([\d.]+)\s*s?(?:\s+for\s+([\d.]+)\s*s?)?"
)
_ASKED_S, _TURN_S = 2.0, 0.1
"""`headrace status` is asked so long before, as it takes its time."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Fault:
    """What is done to a process of this name, or the first one of this role, ``at`` s of the run.

    One that is stopped goes on after ``for_s``.
    """

    action: str
    process: str
    at: float
    for_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Raises UsageError for what is none."""
        found = _FAULT.fullmatch(text.strip())
        if found is None or (found[1] == "stop") != (found[4] is not None):
            raise UsageError(
                f"{text}: faults are like 'kill prefill at 30s', 'terminate decode-0 at 5s' or "
                "'stop decode at 10s for 2s'"
            )
        try:
            return cls(found[1], found[2], float(found[3]), float(found[4]) if found[4] else None)
        except ValueError:
            raise UsageError(f"{text}: that is no number of seconds") from None

    def __str__(self) -> str:
        lasting = "" if self.for_s is None else f" for {self.for_s:g} s"
        return f"{self.action} {self.process}{lasting}"


class Faults:
    """Does them, and keeps what was done, or why it ``failed``: ``done``, as a summary has it."""

    def __init__(self, faults: Sequence[Fault], port: int) -> None:
        self._faults, self._port = sorted(faults, key=lambda fault: fault.at), port
        self._stopped: set[int] = set()
        self.done: list[dict[str, Any]] = []

    @classmethod
    def at(cls, faults: Sequence[Fault], target: str, status_port: int | None) -> "Faults":
        """For the deployment whose gateway is ``target``, or listens on this port.

        Raises:
            UsageError: it is not on this machine, or has no such process.
        """
        parts = urlsplit(target)
        if faults and parts.hostname not in _LOOPBACK:
            raise UsageError("faults are for a deployment on this machine")
        made = cls(faults, status_port or parts.port or 80)
        for fault in faults:
            made._pid(fault.process, made._processes())
        return made

    async def run(self, clock: Clock) -> None:
        """Until all are done, or it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for fault in self._faults:
                    tasks.create_task(self._do(fault, clock))
        finally:
            self._go_on(*self._stopped)

    async def _do(self, fault: Fault, clock: Clock) -> None:
        try:
            await _until(fault.at - _ASKED_S, clock)
            processes = await asyncio.to_thread(self._processes)
            await _until(fault.at, clock)
            pid = self._pid(fault.process, processes)
            os.kill(pid, _SIGNALS[fault.action])
        except asyncio.CancelledError:
            self._failed(fault, clock, "the run was over before")
            raise
        except (UsageError, OSError, subprocess.SubprocessError) as error:  # the run goes on
            self._failed(fault, clock, str(error))
            return
        self.done.append({"at": clock(), "what": str(fault), "pid": pid})
        if fault.for_s is not None:
            self._stopped.add(pid)
            await asyncio.sleep(fault.for_s)
            self._go_on(pid)

    def _failed(self, fault: Fault, clock: Clock, why: str) -> None:
        self.done.append({"at": clock(), "what": str(fault), "failed": why})

    def _go_on(self, *pids: int) -> None:
        for pid in pids:
            self._stopped.discard(pid)
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # something else ended it

    def _processes(self) -> dict[str, int]:
        beside = Path(sys.executable).with_name("headrace")
        command = str(beside) if beside.exists() else shutil.which("headrace")
        if command is None:
            raise UsageError("faults need the `headrace` command")
        done = subprocess.run(
            [command, "status", "--json", "--port", str(self._port)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if done.returncode != 0:
            raise UsageError(f"nothing that `headrace up` started listens on port {self._port}")
        return dict(orjson.loads(done.stdout)["processes"])

    def _pid(self, name: str, processes: dict[str, int]) -> int:
        for process, pid in sorted(processes.items()):
            if process == name or process.rpartition("-")[0] == name:
                return pid
        raise UsageError(f"no process {name}; there are {', '.join(sorted(processes))}")


async def _until(at: float, clock: Clock) -> None:
    """In turns, as a run may start its clock again."""
    while (left := at - clock()) > 0:  # noqa: ASYNC110 - what is waited for is the time
        await asyncio.sleep(min(left, _TURN_S))
