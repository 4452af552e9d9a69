"""Behaviour of the command if the packages of the ``loadgen`` extra are not installed."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
sys.argv[0] = "headrace-loadgen"
from loadgen.cli import main
main()
"""
EXTRA = ("matplotlib", "scipy")
COMMANDS = {
    "run": ("run", "http://127.0.0.1:9/v1", "--rate", "1", "--requests", "1"),
    "sweep": ("sweep", "http://127.0.0.1:9/v1", "--rate", "1", "--duration", "1", "--out", "sweep"),
    "compare": ("compare", "before", "after"),
    "report": ("report", "run"),
}


def loadgen(*arguments: str, missing: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    code = BLOCKED.replace("{names!r}", repr(missing))
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.few(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_missing_extra_is_named_in_one_line(command: str) -> None:
    done = loadgen(*COMMANDS[command], missing=EXTRA)
    assert done.returncode == 2
    assert done.stderr == (
        "headrace-loadgen: matplotlib, scipy are not installed; "
        f"run: {sys.executable} -m pip install 'headrace[loadgen]'\n"
    )


def test_single_missing_package_is_named() -> None:
    done = loadgen(*COMMANDS["compare"], missing=("scipy",))
    assert done.returncode == 2
    assert "scipy is not installed" in done.stderr
    assert "matplotlib" not in done.stderr


@pytest.mark.few(2)
@pytest.mark.parametrize("arguments", [(), *((command,) for command in COMMANDS)], ids=str)
def test_help_needs_no_extra(arguments: tuple[str, ...]) -> None:
    done = loadgen(*arguments, "--help", missing=EXTRA)
    assert done.returncode == 0, done.stderr
    assert "Usage: headrace-loadgen" in done.stdout
