"""End of a process at once, with the exit code and the output of one that ends as usual."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys
from services.common.process_end import end_at_once, ending

atexit.register(print, "exit handler")
with ending():
    if sys.argv[1] == "at once":
        end_at_once()
    print("output")
    exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("statement", "code", "error"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("raise OSError('a fault')", 1, "OSError: a fault"),
    ],
)
@pytest.mark.parametrize(
    ("when", "output"), [("at once", "output\n"), ("later", "output\nexit handler\n")]
)
def test_exit_code_does_not_depend_on_how_the_process_ends(
    when: str, output: str, statement: str, code: int, error: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, when, statement]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, output)
    assert error in ended.stderr


def test_thread_does_not_prevent_the_end_at_once() -> None:
    statement = "from threading import *; Thread(target=Event().wait).start(); sys.exit(2)"
    command = [sys.executable, "-c", PROGRAM, "at once", statement]
    assert subprocess.run(command, check=False, timeout=60).returncode == 2


def test_process_that_hangs_ends_within_the_limit() -> None:
    program = (
        "import threading; from services.common.process_end import end_within; end_within(0.1); "
        "threading.Event().wait()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "not ended in time" in ended.stdout + ended.stderr
