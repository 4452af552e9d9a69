"""Lifecycle of a worker process: start, register and serve; on a signal, drain and stop."""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import structlog

from headrace.v1 import request_pb2
from runtime.core.request import Request
from runtime.engine import Engine, StepOutput
from runtime.pages.sent import SentTokens
from services.common.addresses import bracketed
from services.common.grpc_server import GrpcServer
from services.common.memory import freeze_loaded
from services.common.metrics_server import OperationServers
from services.common.placement import PROTOCOL, Registration, Role
from services.common.probes import Probes
from services.common.process_end import end_within
from services.common.secret_files import reloading
from services.common.signals import stop_on_signals
from services.common.token_ids import count_tokens
from services.transfer.local_endpoint import Endpoints
from services.transfer.metrics import TransferMetrics
from services.worker.device import allocated_bytes
from services.worker.engine_thread import STOP_S, EngineThread
from services.worker.loading import CAUSE_S, Loaded
from services.worker.metrics import WorkerMetrics
from services.worker.rank_loading import LoadedRank
from services.worker.registration import Registrar
from services.worker.self_test import SelfTest
from services.worker.settings import WorkerSettings
from services.worker.threads import set_switch_interval
from services.worker.wire import constraint_from_message

log = structlog.get_logger()


class Worker(ABC):
    """Base of prefill and decode workers: engine thread, metrics, shutdown.

    Attributes:
        endpoints: endpoints of KV transfers.
        grammars: compiled grammars of constrained requests.
        address: gRPC address at which other services reach this worker.
        fault: future that fails when the engine or the transfer fails; the process must then end.
        draining: whether new work is refused.
        registrar: reports admitted placements; None until the worker registers.
        decodes: whether a prefill worker also decodes; see `Registration.decodes`.
        overflow_tokens: see `Registration.overflow_tokens`.
    """

    address = ""
    decodes = False
    overflow_tokens: int | None = None

    def __init__(self, loaded: Loaded, endpoints: Endpoints) -> None:
        loop = asyncio.get_running_loop()
        self.identity = loaded.identity
        self.sizes = loaded.rank.sizes
        self.metrics = WorkerMetrics()
        self.transfers = TransferMetrics(self.metrics.registry)
        model = loaded.rank.executor.model
        self.metrics.info.labels(
            self.identity.worker_id,
            self.identity.model.name,
            self.identity.compatibility.kv_format,
            model.matmul,
            model.kv_format.kernels,
            self.identity.compatibility.kernel_plan_hash,
        ).set(1)
        self.fault: asyncio.Future[None] = loop.create_future()
        self.engine = EngineThread(loaded.engine, on_output=self._receive, on_fault=self._fail_soon)
        self.self_test = SelfTest(self.engine, self.identity.model.vocab_size)
        self.endpoints = endpoints
        self.grammars = loaded.grammars
        self.followers = loaded.followers
        self._show_memory(loaded.rank)
        self.draining = False
        self.registrar: Registrar | None = None

        def report(fail: Callable[[BaseException], None], future: "Future[None]") -> None:
            if error := future.exception():
                loop.call_soon_threadsafe(fail, error)

        self.followers.fault.add_done_callback(partial(report, self._fail))
        for endpoint in endpoints:
            endpoint.fault.add_done_callback(partial(report, self._fail_soon))

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether the worker has no request."""

    @property
    def not_ready(self) -> str | None:
        """Reason to send a running worker no more requests, or None; checked periodically."""
        return self.self_test.failure

    @property
    def page_bytes(self) -> dict[str, int]:
        """Bytes of a page of each page group, by name, on all ranks together."""
        sizes = zip(*(each.layout.page_bytes.groups for each in self.endpoints), strict=True)
        return {
            group.name: sum(each)
            for group, each in zip(self.engine.page_plan.groups, sizes, strict=True)
        }

    @property
    def stalled_s(self) -> dict[tuple[str, int], float]:
        """Seconds since each thread made progress in its current step, by name and rank.

        They are 0 without work.
        """
        threads = {
            "engine": [self.engine.stalled_s, *self.followers.stalled_s],
            "transfer": [endpoint.stalled_s for endpoint in self.endpoints],
        }
        return {
            (name, rank): stalled_s
            for name, ranks in threads.items()
            for rank, stalled_s in enumerate(ranks)
        }

    def stalled(self, limit_s: float) -> str | None:
        """Return which thread has made no progress for longer than ``limit_s``, or None."""
        for (name, rank), stalled_s in self.stalled_s.items():
            if stalled_s > limit_s:
                of_rank = f" of rank {rank}" if self.followers.ranks else ""
                return (
                    f"the {name} thread{of_rank} has made no progress in its step for "
                    f"{stalled_s:.0f} s"
                )
        return None

    def serve_at(self, address: str) -> None:
        """Set ``address``, before the server starts."""
        self.address = address

    @abstractmethod
    def end_requests(self) -> None:
        """End every request with DRAINING, so that its gateway continues it on another worker."""

    @abstractmethod
    def _deliver(self, output: StepOutput) -> None:
        """Pass a step's output to its sequences; called on the event loop."""

    def _receive(self, output: StepOutput) -> None:
        if affected := self.self_test.observe(output):
            self.metrics.not_finite.inc(affected)
        self._deliver(output)

    def sent_tokens(self, request: request_pb2.Request, first: int = 0) -> SentTokens:
        """Return which tokens of a request a prefill worker computes, and sends from ``first``.

        Raises:
            ValueError: tokens cannot be sent from ``first``; see `SentTokens`.
        """
        return SentTokens.of(
            self.engine.page_plan,
            known=count_tokens(request.tokens),
            prompt_tokens=request.prompt_tokens,
            kv_eviction=self.identity.compatibility.kv_eviction,
            first=first,
        )

    def count_saved(self, sent: SentTokens) -> None:
        """Count the bytes of KV of a sequence that were not sent, because this worker has them."""
        if sent.first:
            held = self.engine.page_plan.by_name(sent.held)
            saved = sum(pages * self.page_bytes[group] for group, pages in held.items())
            self.transfers.saved_bytes.inc(saved)

    def digest(
        self, page_tables: Sequence[Sequence[int]], sent: SentTokens
    ) -> "asyncio.Future[str]":
        """Start to compute a digest of a sequence's KV on all ranks, with a part per plane group.

        It does not depend on which ranks have which KV heads. Copies of a KV head may differ on
        GPUs. That of the first rank counts, which is sent to the first rank of a reader that has
        the head; see `routes_between`.
        """

        def compute(engine: Engine) -> str:
            ready = engine.executor.record_event()  # another rank may still execute a step
            of_ranks = [each.digest(page_tables, sent, after=ready) for each in self.endpoints]
            of_heads: dict[int, list[str]] = {}
            for digests in reversed(of_ranks):
                of_heads.update(digests)
            by_group = zip(*(of_heads[head] for head in sorted(of_heads)), strict=True)
            return "-".join(sha256(" ".join(each).encode()).hexdigest()[:16] for each in by_group)

        return self.engine.run(compute)

    async def with_grammar(self, request: Request, message: request_pb2.Request) -> Request:
        """Return a request with the grammar of its message, compiled without blocking.

        Raises:
            InvalidRequest: the constraint is invalid, or does not allow the output so far.
        """
        spec = constraint_from_message(message)
        if spec is None:
            return request
        output = request.tokens[request.prompt_tokens :]
        return replace(request, grammar=await self.grammars.start(spec, request.salt, output))

    def report_admitted(self, placement_id: str) -> None:
        """Report a placement whose command was submitted; see `Registrar.admit`."""
        if self.registrar is not None:
            self.registrar.admit(placement_id)

    def report_computed_here(self, placement_id: str) -> None:
        """Report a placement whose prefill worker is not needed; see `Registrar`."""
        if self.registrar is not None:
            self.registrar.computed_here(placement_id)

    def observe(self) -> None:
        """Set the gauges, and repeat a failed self-test; called periodically."""
        if self.self_test.failure:
            self.self_test.start()
        self.metrics.observe(self.engine)
        self.metrics.grammars.observe(self.grammars)
        self.metrics.ranks.set_stalled(self.stalled_s)

    async def close(self) -> None:
        """Stop the engine thread; the memory of the pages is freed when the process ends.

        If a rank has failed, the engine thread may wait for it in a collective, and is abandoned.
        """
        self.grammars.close()
        await self.engine.stop(0.0 if self.followers.fault.done() else STOP_S)

    def _show_memory(self, first: LoadedRank) -> None:
        """Set the gauges of the memory of each rank."""
        show = self.metrics.ranks.set_memory
        allocated = allocated_bytes(first.executor.device)
        show(0, weight_bytes=first.facts.weight_bytes, device_bytes=allocated)
        for each in self.followers.ranks:
            show(each.rank, weight_bytes=each.weight_bytes, device_bytes=each.device_bytes)

    def _fail_soon(self, error: BaseException) -> None:
        """Fail with an error of the engine or of an endpoint.

        A rank that ends causes such errors, too. Its own fault, which names the rank, goes first.
        """
        delay_s = CAUSE_S if self.followers.ranks else 0.0
        asyncio.get_running_loop().call_later(delay_s, self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self.fault.done():
            self.fault.set_exception(error)


FAULT_END_S = 20.0
"""Maximum time of the shutdown after a fault, in seconds. Threads or the device may hang then."""
SEND_S = 0.5
"""Time in which a worker that stops sends its last messages, seconds."""


async def run_worker(
    worker: Worker, server: GrpcServer, settings: WorkerSettings, role: Role
) -> None:
    """Run a worker until SIGTERM or SIGINT, then let running work finish within ``drain_s``.

    Requests that are still running after that end with DRAINING. On SIGHUP, read certificates
    again at once.

    Raises:
        BaseException: the error that ended the engine or transfer thread, after the shutdown.
    """
    set_switch_interval()
    freeze_loaded()
    stop = stop_on_signals()
    registrar, operation = await _start(worker, server, settings, role)
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
        log.info("stopping", worker=worker.identity.worker_id, idle=worker.idle)
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
    worker: Worker, server: GrpcServer, settings: WorkerSettings, role: Role
) -> tuple[Registrar, OperationServers]:
    """Start the engine, the gRPC server, metrics and probes, and the registration."""
    address = f"{bracketed(settings.advertised_host)}:{server.port}"
    registrar = Registrar(
        _registration(worker, address, settings, role),
        worker.engine,
        settings.routers,
        worker.transfers,
        token=settings.token,
        tls=settings.tls,
    )
    worker.registrar = registrar
    worker.serve_at(address)
    worker.metrics.secrets.observe(settings.secret_files, settings.token_check)
    worker.engine.start()
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
        role=role.value,
        worker=worker.identity.worker_id,
        epoch=worker.identity.epoch,
        port=server.port,
        pids=worker.followers.pids,
        **operation.ports,
    )
    return registrar, operation


def _not_ready(worker: Worker, registrar: Registrar) -> str | None:
    """Return why the worker gets no requests now, or None."""
    if worker.draining:
        return "draining"
    return worker.not_ready or registrar.unregistered or registrar.unmatched


def _probes(worker: Worker, registrar: Registrar, stall_s: float) -> Probes:
    """Return the checks of ``/health`` and ``/ready``."""

    async def failure() -> str | None:
        if worker.fault.done():
            return f"the engine or the transfer failed: {worker.fault.exception()!r}"
        return worker.stalled(stall_s)

    async def not_ready() -> str | None:
        return _not_ready(worker, registrar)

    return Probes(not_ready, failure)


def _registration(
    worker: Worker, address: str, settings: WorkerSettings, role: Role
) -> Registration:
    identity = worker.identity
    limits = worker.sizes.limits
    return Registration(
        protocol=PROTOCOL,
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        role=role,
        address=address,
        model=identity.model,
        compatibility=identity.compatibility,
        pages_total=worker.engine.page_plan.by_name(worker.engine.pages_total),
        page_bytes=worker.page_bytes,
        max_running=limits.max_running,
        max_waiting=limits.max_waiting,
        heartbeat_s=settings.heartbeat_s,
        decodes=worker.decodes,
        overflow_tokens=worker.overflow_tokens,
        reuses_prefixes=settings.prefix_cache and not identity.compatibility.kv_eviction,
    )


async def _report_state(
    worker: Worker, server: GrpcServer, registrar: Registrar, period_s: float
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


async def _wait_until_idle(worker: Worker, limit_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not worker.idle and not worker.fault.done():  # noqa: ASYNC110 - once per process
                await asyncio.sleep(0.05)
