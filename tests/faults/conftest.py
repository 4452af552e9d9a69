"""Prints the seed of the fault tests."""

from tests.faults.reference import SEED


def pytest_report_header() -> str:
    return f"FAULT_SEED={SEED}"
