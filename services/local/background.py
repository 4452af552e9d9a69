"""`headrace up --detach`: start a deployment in the background."""

import os
import shlex
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO

from services.common.file_errors import naming
from services.common.interpreter import headrace_command
from services.common.terminal import diagnostics, results
from services.local.logs import tail
from services.local.options import UpOptions
from services.local.state import EXIT_RUNNING, Deployment, DeploymentRunning, lock_holder
from services.local.supervisor import EXIT_SETTINGS_ERROR

_MAX_RESULT_BYTES = 1 << 16


def start_in_background(options: UpOptions) -> int:
    """Run `headrace up` in a session of its own, and return once it is ready or has ended.

    Ctrl-C during the start ends the deployment.

    Returns:
        0, or the exit code of the deployment.

    Raises:
        DeploymentRunning: if a deployment on this port is running or starting.
        OSError: if its log cannot be written.
    """
    if holder := lock_holder(options.port):
        raise DeploymentRunning(options.port, holder)
    folder = Deployment.folder(options.port)
    folder.mkdir(parents=True, exist_ok=True)
    # The child ends with EXIT_RUNNING if another `headrace up` has taken the port meanwhile. Then
    # its log must not replace the up.log of that deployment.
    log_file = folder / f"up.log.{os.getpid()}"
    with tempfile.TemporaryFile() as result:
        command = headrace_command("up", *_flags(options))
        shown_command = shlex.join(command)
        with log_file.open("wb", buffering=0) as log:
            with naming(log_file):  # on a full disk, the child could not report the failure
                log.write(f"{shown_command}\n".encode())
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=log,
                start_new_session=True,
            )
        try:
            code = _wait(child, result, log_file)
        finally:
            if stages := tail(log_file).removeprefix(shown_command).strip():
                diagnostics().print(stages, markup=False)
            if child.returncode == EXIT_RUNNING:
                log_file.unlink()
            else:
                log_file.replace(folder / "up.log")
        results().print(_written(result).decode(), markup=False, soft_wrap=True, end="")
    return code


def _wait(child: "subprocess.Popen[bytes]", result: IO[bytes], log_file: Path) -> int:
    """Return 0 when the deployment is ready, or the exit code of a child that failed.

    When it is ready, the child writes its result: how to use the service. It limits the time of the
    start itself; the preparation before it may take long.
    """
    try:
        with diagnostics().status(f"starting in the background, log in {log_file}"):
            while child.poll() is None:
                if _written(result).endswith(b"\n"):
                    return 0
                time.sleep(0.2)
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise
    return _exit_code(child.returncode)


def _exit_code(code: int) -> int:
    """Return the exit code of a child that ended too early; 128 + n if signal n ended it."""
    return 128 - code if code < 0 else code or EXIT_SETTINGS_ERROR


def _written(result: IO[bytes]) -> bytes:
    # The child shares the position in the file, so that reading must not move it.
    return os.pread(result.fileno(), _MAX_RESULT_BYTES, 0)


def _flags(options: UpOptions) -> list[str]:
    """Return the command-line flags of `headrace up` for these options."""
    flags = []
    for name, value in asdict(options).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags += [flag] if value else []
        elif value is not None:
            flags.append(f"{flag}={value}")
    return flags
