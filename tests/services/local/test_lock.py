"""Locks between processes: exclusive, and released when the holder ends."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.local.lock import LockHeld, ProcessIdentity, holder_of, locked
from tests.services.local.lock_holder import hold_elsewhere, start_holder, wait_until_held

pytestmark = pytest.mark.slow


def test_lock_names_its_holder_and_is_released_by_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    with hold_elsewhere(path) as process:
        with pytest.raises(LockHeld) as refused, locked(path):
            pass
        assert refused.value.holder is not None
        assert refused.value.holder.pid == process.pid
        process.kill()
    assert holder_of(path) is None
    with locked(path):
        assert holder_of(path) == ProcessIdentity.current()


def test_released_lock_has_no_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with locked(path):
            pass
        assert holder_of(path) is None


def test_waiting_for_a_lock_blocks_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        waiting = start_holder(path, "wait")
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=1)
    with waiting:
        wait_until_held(waiting)
        waiting.kill()


def test_identity_of_a_reused_pid_is_not_alive() -> None:
    me = ProcessIdentity.current()
    assert me.alive
    assert not ProcessIdentity(me.pid, me.started - 100).alive


def test_identity_does_not_depend_on_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil derives start times from that clock: they move with it."""
    me = ProcessIdentity.current()
    before = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: before(process) + 3600)
    assert me.alive
    assert ProcessIdentity.current() == me
    assert 0 <= me.age_s < 86400


def test_zombie_and_missing_process_are_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        identity = ProcessIdentity.of(child.pid)
        assert identity is not None
        assert identity.alive
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not identity.alive, "it was not reaped yet"
    assert not identity.alive
    assert ProcessIdentity.of(child.pid) is None


@pytest.mark.parametrize("content", ["", "nonsense", "1", "x y"])
def test_damaged_lock_file_has_no_holder(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lock"
    path.write_text(content)
    assert holder_of(path) is None
    with locked(path):
        pass


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Let every write to a file fail, by a limit on the size of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("full_disk")
def test_write_that_fails_names_the_lock(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large") as error, locked(tmp_path / "lock"):
        pass
    assert error.value.filename == str(tmp_path / "lock")
