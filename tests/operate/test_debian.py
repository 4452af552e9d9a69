"""Programs of Debian packages are provided without root, or the tests fail."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.operate.debian import DebianError, unpack

pytestmark = pytest.mark.operate

NOBODY = 65534


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Run the block and its child processes without the rights of root."""
    if os.geteuid() != 0:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, 0)
    os.setresuid(NOBODY, NOBODY, 0)  # a new program does not inherit the saved id
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


def test_ordinary_user_runs_an_unpacked_program() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's folders are closed to other users
    shutil.chown(folder, *((NOBODY, NOBODY) if os.geteuid() == 0 else (os.geteuid(), None)))
    try:
        with ordinary_user():
            unpacked = unpack("hello", cache=folder / "cache")
            program = unpacked.program("hello")
            answer = subprocess.check_output([program], env=unpacked.environment, text=True)
            assert unpack("hello", cache=folder / "cache") == unpacked
        assert answer == "Hello, world!\n"
        assert program.is_relative_to(folder)
    finally:
        shutil.rmtree(folder)


def test_unknown_package_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DebianError, match="Unable to locate package headrace-does-not-exist"):
        unpack("headrace-does-not-exist", cache=tmp_path)


def test_program_that_no_package_has_is_an_error() -> None:
    with pytest.raises(DebianError, match="no program headrace-does-not-exist"):
        unpack("hello").program("headrace-does-not-exist")
