"""A process that holds a lock: ``python -m tests.services.local.lock_holder PATH [wait]``."""

import subprocess
import sys
import time
from pathlib import Path

from services.local.lock import locked


def start_holder(path: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start a process that prints a line once it holds the lock, and then sleeps."""
    command = [sys.executable, "-m", "tests.services.local.lock_holder", str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def hold_elsewhere(path: Path) -> "subprocess.Popen[str]":
    """Return a process that holds the lock."""
    process = start_holder(path)
    wait_until_held(process)
    return process


def wait_until_held(process: "subprocess.Popen[str]") -> None:
    """Wait until the process holds its lock."""
    if process.stdout is None or process.stdout.readline() != "held\n":
        raise RuntimeError("the lock was not taken")


if __name__ == "__main__":
    with locked(Path(sys.argv[1]), wait=sys.argv[2:] == ["wait"]):
        print("held", flush=True)  # noqa: T201
        time.sleep(60)
