"""A full disk: writes that fail end nothing, and are counted. The free space is a metric."""

import errno
import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.common.disk import CACHE, LOGS, DiskCollector, cache_disk, log_disk
from services.common.logging import CountingHandler

FULL = Path("/dev/full")  # every write fails with ENOSPC

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs Linux")


def value(registry: CollectorRegistry, name: str, use: str) -> float | None:
    return registry.get_sample_value(f"headrace_{name}", {"use": use})


def registry_of(*, caches: bool) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(DiskCollector(caches=caches))
    return registry


LOG_TO_A_FULL_DISK = """
import structlog
from services.common.logging import configure_logging
from tests.services.common.test_disk import registry_of, value

configure_logging("test", format={format!r})
for _ in range(3):
    structlog.get_logger().info("a line", padding="x" * 10_000)
print(value(registry_of(caches=False), "write_failures_total", "logs"))
"""


@pytest.mark.parametrize("format", ["json", "human"])
def test_log_lines_that_do_not_fit_on_the_disk_are_counted(format: str) -> None:
    with FULL.open("w") as full:
        printed = subprocess.run(
            [sys.executable, "-c", LOG_TO_A_FULL_DISK.format(format=format)],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=True,
        ).stdout
    assert float(printed) == 3


class SmallDisk(io.StringIO):
    """A file that keeps the first characters of a text that does not fit."""

    space: int | None = None

    def write(self, text: str) -> int:
        kept = super().write(text[: self.space])
        if kept < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return kept


def test_line_after_a_failed_write_is_complete() -> None:
    disk = SmallDisk()
    handler = CountingHandler(disk)
    for message, space in (("first", None), ("second", 3), ("third", None), ("fourth", None)):
        disk.space = space
        handler.emit(logging.makeLogRecord({"msg": message}))
    assert disk.getvalue().splitlines() == ["first", "sec", "third", "fourth"]


def test_failed_write_of_another_package_is_counted_by_the_log() -> None:
    registry = registry_of(caches=True)
    before = value(registry, "write_failures_total", CACHE)
    assert before is not None
    record = logging.makeLogRecord({"msg": "not cached", "failed_write": CACHE})
    with Path(os.devnull).open("w") as ignored:
        CountingHandler(ignored).emit(record)
    assert value(registry, "write_failures_total", CACHE) == before + 1


def test_space_of_the_disks_that_the_process_writes_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "not" / "made" / "yet"))
    registry = registry_of(caches=True)
    disk = os.statvfs(tmp_path)
    assert value(registry, "disk_size_bytes", CACHE) == disk.f_blocks * disk.f_frsize
    free = value(registry, "disk_free_bytes", CACHE)
    assert free is not None
    assert 0 <= free <= disk.f_blocks * disk.f_frsize
    assert value(registry_of(caches=False), "disk_size_bytes", CACHE) is None


def test_log_that_is_not_a_file_has_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with FULL.open("w") as device:
        monkeypatch.setattr("services.common.disk._STDERR", device.fileno())
        assert log_disk() is None
        assert value(registry_of(caches=False), "disk_free_bytes", LOGS) is None
        assert value(registry_of(caches=False), "write_failures_total", LOGS) is not None


def test_cache_folder_that_cannot_be_read_has_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError

    monkeypatch.setattr(os, "statvfs", fail)
    assert cache_disk() is None
