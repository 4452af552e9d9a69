"""Observation of a deployment during a soak: memory of its processes, outages of its workers."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import linear_regression

import httpx
import psutil

from tests.harness.deployment import Running

Workers = Mapping[str, Mapping[str, object]]
"""The router's view of each worker, by worker id."""
PERIOD_S = 0.25
RSS_PERIOD_S = 2.0
MIN_SPAN_S = 60.0
"""A slope is computed over at least this time."""


@dataclass(frozen=True)
class Outage:
    """Time in which the router did not list a worker as ready.

    Attributes:
        seconds: from the last to the first answer of the router in which it was ready.
        restarted: whether the worker came back as a new epoch.
    """

    worker: str
    seconds: float
    restarted: bool


@dataclass(frozen=True)
class Slope:
    """Growth of one process's resident memory in the second half of its life, after its buffers
    have been allocated, by linear regression.

    Attributes:
        span_s: length of that half, in seconds.
        first_mib, last_mib: memory at the start and at the end of the observation.
    """

    process: str
    mib_per_minute: float
    span_s: float
    first_mib: float
    last_mib: float


@dataclass
class Watch:
    """Samples of a deployment. `watched` fills them from a thread."""

    running: Running
    outages: list[Outage] = field(default_factory=list)
    _memory: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)
    _ready: dict[str, tuple[float, object]] = field(default_factory=dict)
    _down: set[str] = field(default_factory=set)

    def slopes(self) -> list[Slope]:
        """Return the growth of each process that lived long enough."""
        found = []
        for (process, _), samples in self._memory.items():
            times, sizes = zip(*samples[len(samples) // 2 :], strict=True)
            if (span_s := times[-1] - times[0]) >= MIN_SPAN_S:
                slope = 60 * linear_regression(times, sizes).slope
                found.append(Slope(process, slope, span_s, samples[0][1], sizes[-1]))
        return found

    def look_at_workers(self, now: float, workers: Workers) -> None:
        """Record one answer of the router."""
        ready = {name: one["epoch"] for name, one in workers.items() if one["state"] == "ready"}
        self._down |= self._ready.keys() - ready.keys()
        for name, epoch in ready.items():
            since, before = self._ready.get(name, (now, epoch))
            if name in self._down or epoch != before:
                self.outages.append(Outage(name, now - since, epoch != before))
            self._ready[name] = now, epoch
        self._down -= ready.keys()

    def look_at_memory(self, now: float, mib: float, *, process: str, pid: int) -> None:
        """Record the resident memory of one process."""
        self._memory.setdefault((process, pid), []).append((now, mib))


@contextmanager
def watched(running: Running) -> Iterator[Watch]:
    """Observe a deployment during the block."""
    watch = Watch(running)
    stop = threading.Event()

    def observe() -> None:
        memory_at = 0.0
        while not stop.wait(PERIOD_S):
            now = time.monotonic()
            with suppress(httpx.HTTPError, OSError, RuntimeError, KeyError, ValueError):
                watch.look_at_workers(now, running.workers())
            if now >= memory_at:
                memory_at = now + RSS_PERIOD_S
                for name, pid in running.state.pids.items():
                    with suppress(psutil.Error):
                        mib = psutil.Process(pid).memory_info().rss / 2**20
                        watch.look_at_memory(now, mib, process=name, pid=pid)

    thread = threading.Thread(target=observe, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()
