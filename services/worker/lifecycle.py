"""Base of prefill and decode workers: engine thread, metrics, grammars and registration."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from hashlib import sha256

import structlog

from headrace.v1 import request_pb2
from runtime.core.request import Request
from runtime.engine import Engine, StepOutput
from runtime.pages.sent import SentTokens
from services.common.grpc_server import GrpcServer
from services.common.placement import PROTOCOL, Registration, Role
from services.common.token_ids import count_tokens
from services.transfer.local_endpoint import Endpoints
from services.transfer.metrics import TransferMetrics
from services.worker.device import allocated_bytes
from services.worker.engine_thread import STOP_S, EngineThread
from services.worker.loading import CAUSE_S, Loaded
from services.worker.metrics import WorkerMetrics
from services.worker.process import WorkerProcess, run_process
from services.worker.rank_loading import LoadedRank
from services.worker.registration import Registrar
from services.worker.self_test import SelfTest
from services.worker.settings import WorkerSettings
from services.worker.wire import constraint_from_message

log = structlog.get_logger()


class Worker(WorkerProcess):
    """Base of prefill and decode workers: engine thread, metrics, shutdown.

    Attributes:
        endpoints: endpoints of KV transfers.
        grammars: compiled grammars of constrained requests.
        address: gRPC address at which other services reach this worker.
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
        self.worker_id, self.epoch = loaded.identity.worker_id, loaded.identity.epoch
        self.sizes = loaded.rank.sizes
        self._metrics = WorkerMetrics()
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
        self.registrar: Registrar | None = None

        def report(fail: Callable[[BaseException], None], future: "Future[None]") -> None:
            if error := future.exception():
                loop.call_soon_threadsafe(fail, error)

        self.followers.fault.add_done_callback(partial(report, self._fail))
        for endpoint in endpoints:
            endpoint.fault.add_done_callback(partial(report, self._fail_soon))

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

    @property
    def metrics(self) -> WorkerMetrics:
        """Metrics of the process."""
        return self._metrics

    @property
    def pids(self) -> list[int | None]:
        """Ids of the processes of all ranks, this one first."""
        return self.followers.pids

    def serve_at(self, address: str) -> None:
        """Set ``address``, before the server starts."""
        self.address = address

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

    def report_postponed(self, placement_id: str) -> None:
        """Report a placement whose prefill worker is asked later; see `Registrar`."""
        if self.registrar is not None:
            self.registrar.postpone(placement_id)

    def report_ended(self, placement_id: str) -> None:
        """Report a placement whose stream has ended; see `Registrar`."""
        if self.registrar is not None:
            self.registrar.end(placement_id)

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


async def run_worker(
    worker: Worker, server: GrpcServer, settings: WorkerSettings, role: Role
) -> None:
    """Run a worker until SIGTERM or SIGINT, then drain it; see `run_process`."""

    def start(address: str) -> Registrar:
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
        worker.engine.start()
        return registrar

    await run_process(worker, server, settings, role.value, start)


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
