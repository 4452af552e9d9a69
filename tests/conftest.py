"""Hooks of all tests: kernel tests run on a GPU, or interpreted in a child process.

The garbage collector does not run during the collection of tests, and then skips what exists,
thousands of objects of tests and modules: this saves a quarter of the CPU time.
Hypothesis runs without time limits: it measures wall-clock time, which depends on other processes.
"""

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.few import mark_cases_as_long
from tests.kernel_process import (
    mark_kernel_tests,
    pytest_configure,
    pytest_pyfunc_call,
    pytest_runtestloop,
    pytest_unconfigure,
)

__all__ = [
    "pytest_collection",
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


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_kernel_tests(items)
    mark_cases_as_long(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
