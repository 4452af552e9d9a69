"""Limits on the size of packages, files and functions, and the places of tests."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("codec", "runtime", "services", "loadgen")
MAX_FILE_LINES = 500
"""A file tells one story, and most have fewer than 350 lines. Code is not squeezed to meet this."""
MAX_FUNCTION_LINES = 60
NOT_COUNTED = {"README.md", "BENCHMARKS.md", "__init__.py", "py.typed", "__pycache__"}
COMPILED = {"jit", "compiled"}
"""Decorators of kernels and compiled loops, which may be longer than other functions."""


def sources() -> list[Path]:
    return [
        path for package in (*PACKAGES, "tests") for path in sorted((ROOT / package).rglob("*.py"))
    ]


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = set()
    for decorator in function.decorator_list:
        node = decorator.func if isinstance(decorator, ast.Call) else decorator
        names.add(node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", ""))
    return bool(names & COMPILED)


@pytest.mark.parametrize(("package", "limit"), [("runtime", 21), ("codec", 16)])
def test_package_roots_stay_small(package: str, limit: int) -> None:
    entries = {path.name for path in (ROOT / package).iterdir()} - NOT_COUNTED
    assert len(entries) <= limit, sorted(entries)


def test_files_stay_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources()}
    long = {str(path): count for path, count in lengths.items() if count > MAX_FILE_LINES}
    assert not long


def test_functions_outside_kernels_stay_short() -> None:
    long = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_kernel(node):
                continue
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > MAX_FUNCTION_LINES:
                long[f"{path}:{node.name}"] = count
    assert not long


@pytest.mark.parametrize("folder", ["e2e", "faults"])
def test_folders_of_deployment_tests_contain_only_tests(folder: str) -> None:
    """Programs are in `tests/programs`, and what they share with tests in `tests/harness`."""
    files = [path for path in (ROOT / "tests" / folder).rglob("*") if path.is_file()]
    names = {path.name for path in files if path.parent.name != "__pycache__"}
    assert not {name for name in names if not name.startswith("test_")} - {"conftest.py"}


def test_tests_of_deployments_are_where_make_collects_them() -> None:
    marked = [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.e2e" in path.read_text() and path.name != Path(__file__).name
    ]
    assert {path.parts[1] for path in marked} == {"e2e", "faults"}
