"""Hooks of all tests: kernel tests run on a GPU, or interpreted in a child process.

The garbage collector skips what exists after the collection of tests, thousands of objects of tests
and modules: this saves a quarter of the CPU time.
Hypothesis runs without time limits: it measures wall-clock time, which depends on other processes.
"""

import gc
from contextlib import suppress

import pytest

from tests.kernel_process import (
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_pyfunc_call,
    pytest_runtestloop,
    pytest_unconfigure,
)

__all__ = [
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_pyfunc_call",
    "pytest_runtestloop",
    "pytest_unconfigure",
]

with suppress(ImportError):  # `make test-gpu` may run in an interpreter without Hypothesis
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
