"""Disks that a process writes to: their free space, and writes that failed, as metrics.

Failed writes do not end a request or a process. A log line is dropped, and a compiled kernel is not
cached, so that the next process compiles it again.
"""

import os
from collections.abc import Iterator
from stat import S_ISREG
from threading import Lock

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.cache import cache_dir
from services.common.errors import SettingsError

LOGS, CACHE = "logs", "cache"
"""Uses of a disk, as in the label ``use``: log lines, and files in the cache folder."""

_STDERR = 2
"""File descriptor of the standard error output."""

_failures = {LOGS: 0, CACHE: 0}
_lock = Lock()


def count_failed_write(use: str) -> None:
    """Count a write of this process that failed."""
    with _lock:
        _failures[use] += 1


def log_disk() -> os.statvfs_result | None:
    """Return the disk of the log, or None if stderr is not a file, as in a container."""
    try:
        return os.fstatvfs(_STDERR) if S_ISREG(os.fstat(_STDERR).st_mode) else None
    except OSError:
        return None


def cache_disk() -> os.statvfs_result | None:
    """Return the disk of the cache folder, or None if that cannot be determined."""
    try:
        folder = cache_dir().absolute()
        return os.statvfs(next(path for path in (folder, *folder.parents) if path.is_dir()))
    except (OSError, RuntimeError, SettingsError):  # without a home folder, there is no cache
        return None


class DiskCollector(Collector):
    """Space of the disks and numbers of failed writes, read in each scrape.

    Args:
        caches: whether the process writes to the cache folder.
    """

    def __init__(self, *, caches: bool) -> None:
        self._disks = {LOGS: log_disk} | ({CACHE: cache_disk} if caches else {})

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. A use without a disk has no series of sizes."""
        failures = CounterMetricFamily(
            "headrace_write_failures", "Writes to a disk that failed, by use.", labels=["use"]
        )
        free = GaugeMetricFamily(
            "headrace_disk_free_bytes", "Free bytes of the disk, by use.", labels=["use"]
        )
        size = GaugeMetricFamily(
            "headrace_disk_size_bytes", "Size of the disk in bytes, by use.", labels=["use"]
        )
        for use, find in self._disks.items():
            failures.add_metric([use], _failures[use])
            if disk := find():
                free.add_metric([use], disk.f_bavail * disk.f_frsize)
                size.add_metric([use], disk.f_blocks * disk.f_frsize)
        yield from (failures, free, size)
