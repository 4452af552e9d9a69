"""Child processes do not import modules from the current folder."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from services.common.interpreter import headrace_command, python_command

ROOT = Path(__file__).parents[3]
OWNERS = {Path("services/common/interpreter.py"), Path("loadgen/faults.py")}
"""Files that may name the interpreter; the load generator looks for programs beside it."""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with a module of the same name as a package that the command imports."""
    (tmp_path / "typer.py").write_text("raise SystemExit('planted')")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [headrace_command("version"), python_command("-c", "import typer")]
)
def test_module_in_the_current_folder_is_not_imported(planted: Path, command: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "proto")))}
    done = subprocess.run(
        command, cwd=planted, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "planted" not in done.stderr


def test_all_child_processes_use_these_commands() -> None:
    naming = {
        path.relative_to(ROOT)
        for package in ("services", "loadgen", "runtime", "codec")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"\bsys\.executable\b(?!} -m pip)", path.read_text())  # not in messages
    }
    assert naming == OWNERS
