"""Pytest hooks for all tests, and the markers `long` and `slow` by file or test name."""

import pytest

from tests.kernel_process import (
    mark_kernel_tests,
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

_LONG = (
    "tests/codec/gpu/test_kernels.py",
    "tests/runtime/attention/test_kernels.py",
    "tests/runtime/gemm/test_kernels.py",
    "tests/runtime/gemm/test_backend.py",
    "tests/runtime/megakernel/test_kernels.py",
    "tests/runtime/layers/test_kernels.py",
    "tests/e2e/test_equality.py::test_factorized_tokens",
    "tests/e2e/test_quality.py::test_serving_overhead",
)
"""Prefixes of the ids of tests with the marker `long`."""
_SLOW = (
    "tests/codec/cpu/test_backend.py::test_concurrent_threads",
    "tests/runtime/bench/",
    "tests/runtime/checkpoint/test_gguf.py::test_smollm2",
    "tests/runtime/gemm/test_large_m_compiles.py",
    "tests/runtime/megakernel/test_compiles.py",
    "tests/runtime/models/test_model.py::test_smollm2",
    "tests/services/common/test_tokenizer.py::test_ids_and_text",
    "tests/services/gateway/test_service.py",
    "tests/services/local/",
    "tests/services/transfer/test_agent",
)
"""Prefixes of the ids of tests with the marker `slow`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_kernel_tests(items)
    for item in items:
        if item.nodeid.startswith(_LONG):
            item.add_marker("long")
        elif item.nodeid.startswith(_SLOW):
            item.add_marker("slow")
