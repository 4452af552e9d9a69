"""Hooks of all tests: kernel tests run on a GPU, or interpreted in a child process."""

from tests.kernel_process import (
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_pyfunc_call,
    pytest_runtestloop,
    pytest_unconfigure,
)

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_pyfunc_call",
    "pytest_runtestloop",
    "pytest_unconfigure",
]
