"""Runs kernel checks in other processes: importing triton decides whether they are interpreted."""

import os
import subprocess
import sys
from pathlib import Path

_INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_MOST = 8
"""Processes at a time."""


def run_checks(checks: Path, *, interpreted: bool) -> None:
    """Run a file of test functions; fails as they fail."""
    environment = os.environ | (_INTERPRETED if interpreted else {"TRITON_INTERPRET": "0"})
    processes = str(min(_MOST, os.cpu_count() or 1))
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", processes),
        str(checks),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
