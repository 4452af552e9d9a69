"""Markers of tests that are slow as a whole file or by name.

New tests use the decorators `pytest.mark.slow` and `pytest.mark.long` instead; see pyproject.toml.
"""

import pytest

_LONG = (
    "tests/codec/gpu/test_kernels.py::test_interpreted",
    "tests/runtime/test_kernels.py::test_interpreted",
    "tests/e2e/test_equality.py::test_those_of_a_factorized_model",
    "tests/e2e/test_quality.py::test_what_serving_costs",
)
_SLOW = (
    "tests/codec/cpu/test_backend.py::test_threads",
    "tests/codec/test_hostile_payloads.py::test_a_hundred_thousand",
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(_LONG):
            item.add_marker("long")
        elif item.nodeid.startswith(_SLOW):
            item.add_marker("slow")
