"""Locks between processes: exclusive, and released when the holder ends."""

import subprocess
from pathlib import Path

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


@pytest.mark.parametrize("content", ["", "nonsense", "1", "x y"])
def test_damaged_lock_file_has_no_holder(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lock"
    path.write_text(content)
    assert holder_of(path) is None
    with locked(path):
        pass
