"""The marker `few` keeps the same cases in every run, and leaves the others to `make test-long`."""

import subprocess
import sys
from pathlib import Path

from tests.few import choose

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.few(3)
@pytest.mark.parametrize("a", range(6))
@pytest.mark.parametrize("b", [0, pytest.param(1, marks=pytest.mark.long), 2])
def test_many(a, b): ...

class TestGroup:
    @pytest.mark.few(2)
    @pytest.mark.parametrize("a", "xyz")
    def test_many(self, a): ...

@pytest.mark.few(2)
@pytest.mark.parametrize("a", ["[", "]"])
def test_as_many_as_cases(a): ...

@pytest.mark.parametrize("a", range(4))
def test_unmarked(a): ...
"""


def collected(folder: Path, markers: str) -> set[str]:
    """Return the ids of the collected tests, without the path of their file."""
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", markers]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", "pyproject.toml", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {line.partition("::")[2] for line in lines if "::" in line}


def test_some_cases_are_kept_and_others_are_long(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_cases.py").write_text(TESTS)
    kept, long = (collected(tmp_path, markers) for markers in ("not long", "long"))
    many = {case for case in kept if case.startswith("test_many[")}
    assert len(many) == 3
    assert {case[len("test_many[")] for case in many} == {"0", "2"}  # both values of `b`
    assert len({case[-2] for case in many}) == 3
    assert sum(case.startswith("TestGroup::test_many[") for case in kept) == 2
    assert len(kept) == 3 + 2 + 2 + 4
    assert len(long) == 18 - 3 + 3 - 2
    assert not kept & long


def test_choice_does_not_depend_on_the_order_of_cases() -> None:
    cases = {f"t[{a}-{b}]": {("a", f"{a}"), ("b", f"{b}")} for a in range(9) for b in range(2)}
    chosen = choose(cases, 5)
    assert choose(dict(reversed(cases.items())), 5) == chosen
    assert len({value for case in chosen for value in cases[case]}) == 5 + 2
    assert choose(cases, 18) == choose(cases, 50) == cases.keys()
