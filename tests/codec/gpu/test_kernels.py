"""Run `kernel_checks.py` in a child process: interpreted on the CPU, compiled on a GPU."""

from pathlib import Path

import pytest
import torch

from tests.kernel_process import run_checks

CHECKS = Path(__file__).with_name("kernel_checks.py")


def test_interpreted_kernels_agree_with_the_reference() -> None:
    run_checks(CHECKS, interpreted=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compiled_kernels_agree_with_the_reference() -> None:
    run_checks(CHECKS, interpreted=False)
