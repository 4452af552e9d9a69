"""Logs stay bounded, also on a full disk."""

import errno
import shutil
from pathlib import Path

import pytest

from services.local.logs import open_log, previous_log, rotate


def test_content_moves_to_the_previous_log_and_the_writer_continues(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    previous_log(path).write_bytes(b"older")
    with open_log(path) as writer:
        writer.write(b"first\n")
        writer.flush()
        rotate(path, 6)
        assert path.read_bytes() == b"first\n", "it is not too large"
        rotate(path, 5)
        writer.write(b"second\n")
    assert (tmp_path / "decode-0.log.1").read_bytes() == b"first\n"
    assert path.read_bytes() == b"second\n"


def test_log_that_cannot_be_copied_is_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "router.log"
    path.write_bytes(b"content")

    def fail(source: Path, target: Path) -> None:
        target.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)
    rotate(path, 1)
    assert path.read_bytes() == b""
    assert not previous_log(path).exists()


def test_missing_log_is_not_rotated_and_an_unwritable_one_discards_lines(tmp_path: Path) -> None:
    rotate(tmp_path / "missing.log", 0)
    with open_log(tmp_path / "no folder" / "router.log") as writer:
        writer.write(b"lost")
    assert list(tmp_path.iterdir()) == []
