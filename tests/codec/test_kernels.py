"""The Triton kernels: interpreted in a process of their own, compiled where there is a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).with_name("kernel_checks.py")


def run_checks(environment: dict[str, str]) -> None:
    """Run `kernel_checks.py` in a process, since importing triton decides on the interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_interpreted_kernels_agree_with_the_reference() -> None:
    run_checks({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compiled_kernels_agree_with_the_reference() -> None:
    run_checks({"TRITON_INTERPRET": "0"})
