"""Compiled loops work without their cache on disk."""

import errno
import logging
from typing import Any

import pytest
from numba.core.caching import FunctionCache

from runtime.cpu.jit import compiled


def double(x: int) -> int:
    return 2 * x


def test_full_disk_does_not_fail_the_first_call_of_a_function(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FunctionCache, "_save_overload", fail)
    monkeypatch.setattr(FunctionCache, "load_overload", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        assert compiled(double)(21) == 42
    (record,) = caplog.records
    assert getattr(record, "failed_write", None) == "cache"
    assert "No space left on device" in record.message
