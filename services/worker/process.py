"""The process of a worker of any role: start, register and serve; on a signal, drain and stop."""

import asyncio
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from services.common.addresses import bracketed
from services.common.grpc_server import GrpcServer
from services.common.memory import freeze_loaded
from services.common.metrics_server import OperationServers
from services.common.probes import Probes
from services.common.process_end import end_within
from services.common.secret_files import reloading
from services.common.signals import stop_on_signals
from services.worker.process_metrics import ProcessMetrics
from services.worker.process_settings import ProcessSettings
from services.worker.registrar import BaseRegistrar
from services.worker.threads import set_switch_interval

log = structlog.get_logger()


Start = Callable[[str], BaseRegistrar[Any]]


class WorkerProcess(ABC):
    """A worker as its process sees it.

    Attributes:
        worker_id, epoch: id of the worker, and of this life of it.
        fault: future that fails when a thread fails; the process must then end.
        draining: whether new work is refused.
        parts: what may fail, for the reason in ``/health``.
    """

    worker_id: str
    epoch: str
    fault: "asyncio.Future[None]"
    draining = False
    parts = "the engine or the transfer"

    @property
    @abstractmethod
    def metrics(self) -> ProcessMetrics:
        """Metrics of the process."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether the worker has no request."""

    @property
    @abstractmethod
    def not_ready(self) -> str | None:
        """Reason to send a running worker no more requests, or None; checked periodically."""

    @property
    def pids(self) -> list[int | None]:
        """Ids of the processes of the worker, this one first."""
        return [os.getpid()]

    @abstractmethod
    def stalled(self, limit_s: float) -> str | None:
        """Return which thread has made no progress for longer than ``limit_s``, or None."""

    @abstractmethod
    def end_requests(self) -> None:
        """End every request with DRAINING, so that its gateway continues it on another worker."""

    @abstractmethod
    def observe(self) -> None:
        """Set the gauges; called periodically."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the threads."""


FAULT_END_S = 20.0
"""Maximum time of the shutdown after a fault, in seconds. Threads or the device may hang then."""
SEND_S = 0.5
"""Time in which a worker that stops sends its last messages, seconds."""


async def run_process(
    worker: WorkerProcess,
    server: GrpcServer,
    settings: ProcessSettings,
    role: str,
    start: Start,
) -> None:
    """Run a worker until SIGTERM or SIGINT, then let running work finish within ``drain_s``.

    Requests that are still running after that end with DRAINING. On SIGHUP, read certificates
    again at once.

    Args:
        role: name of the role, for logs.
        start: starts the threads, and returns what registers the worker under its gRPC address.

    Raises:
        BaseException: the error that ended a thread of the worker, after the shutdown.
    """
    set_switch_interval()
    freeze_loaded()
    stop = stop_on_signals()
    registrar, operation = await _start(worker, server, settings, role, start)
    tending = asyncio.create_task(_report_state(worker, server, registrar, settings.heartbeat_s))
    try:
        stopping = asyncio.create_task(stop.wait())
        ends: set[asyncio.Future[Any]] = {stopping, worker.fault, tending}
        async with reloading(settings.secret_files):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set() and not worker.fault.done():
            worker.draining = True
            await server.set_serving(False)
            await registrar.drain()
            await _wait_until_idle(worker, settings.drain_s)
    finally:
        if worker.fault.done():
            end_within(FAULT_END_S)
        log.info("stopping", worker=worker.worker_id, idle=worker.idle)
        if worker.draining and not worker.fault.done():  # else gateways count a lost worker
            worker.end_requests()
        tending.cancel()
        await registrar.stop()
        await server.stop(SEND_S)
        await worker.close()
        await asyncio.to_thread(operation.stop)
    for watched in (worker.fault, tending):
        if watched.done() and not watched.cancelled():
            watched.result()


async def _start(
    worker: WorkerProcess,
    server: GrpcServer,
    settings: ProcessSettings,
    role: str,
    start: Start,
) -> tuple[BaseRegistrar[Any], OperationServers]:
    """Start the threads, the gRPC server, metrics and probes, and the registration."""
    registrar = start(f"{bracketed(settings.advertised_host)}:{server.port}")
    worker.metrics.secrets.observe(settings.secret_files, settings.token_check)
    await server.start()
    operation = OperationServers.start(
        settings,
        _probes(worker, registrar, settings.stall_s),
        worker.metrics.registry,
        settings.metrics_port,
    )
    registrar.start()
    log.info(
        "ready",
        role=role,
        worker=worker.worker_id,
        epoch=worker.epoch,
        port=server.port,
        pids=worker.pids,
        **operation.ports,
    )
    return registrar, operation


def _not_ready(worker: WorkerProcess, registrar: BaseRegistrar[Any]) -> str | None:
    """Return why the worker gets no requests now, or None."""
    if worker.draining:
        return "draining"
    return worker.not_ready or registrar.unregistered or registrar.unmatched


def _probes(worker: WorkerProcess, registrar: BaseRegistrar[Any], stall_s: float) -> Probes:
    """Return the checks of ``/health`` and ``/ready``."""

    async def failure() -> str | None:
        if worker.fault.done():
            return f"{worker.parts} failed: {worker.fault.exception()!r}"
        return worker.stalled(stall_s)

    async def not_ready() -> str | None:
        return _not_ready(worker, registrar)

    return Probes(not_ready, failure)


async def _report_state(
    worker: WorkerProcess, server: GrpcServer, registrar: BaseRegistrar[Any], period_s: float
) -> None:
    """Set the gauges periodically, and report whether the worker is ready."""
    reported: str | None = "starting"
    while True:
        worker.observe()
        not_ready = _not_ready(worker, registrar)
        worker.metrics.ready.set(math.nan if worker.draining else not_ready is None)
        if not_ready != reported and not worker.draining:
            level = logging.INFO if not_ready is None or reported else logging.WARNING
            log.log(level, "readiness changed", not_ready=not_ready)
            reported = not_ready
            registrar.not_ready = worker.not_ready
            await server.set_serving(not_ready is None)
        await asyncio.sleep(period_s)


async def _wait_until_idle(worker: WorkerProcess, limit_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not worker.idle and not worker.fault.done():  # noqa: ASYNC110 - once per process
                await asyncio.sleep(0.05)
