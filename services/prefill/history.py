"""READs of history: KV of a prompt's first tokens, from the decode worker that requests the rest.

The decode worker has generated the earlier answers of a chat, so that it has KV of the next prompt
that this worker lacks. This worker needs it, too, because the new tokens attend to it. The decode
worker pins the pages, and sends them with the protocol by which this worker sends KV to it. Later
prompts find the pages only after all segments have been verified. If the KV does not arrive in
time, the engine computes it, and the request continues.

The engine allocates the pages before the request is sent. That cannot lead to a deadlock:
the decode worker allocates nothing for a pin, which it grants or refuses at once, and the wait for
the transfer is bounded.
"""

import asyncio
import logging
import time

import structlog

from headrace.v1 import decode_pb2, error_pb2, request_pb2, sampling_pb2
from runtime.core.sequence import Purpose
from runtime.engine import HistoryArrived, Reserved
from runtime.pages.sent import SentTokens
from services.common.token_ids import pack_tokens
from services.common.tracing import Attributes, Kind
from services.prefill.history_policy import HistoryPolicy
from services.prefill.metrics import HistoryMetrics
from services.transfer.fetch import Fetch, FetchFailed, FetchTimes
from services.transfer.prefill_client import PrefillClients
from services.transfer.receiver import Receiver
from services.worker.lifecycle import Worker
from services.worker.prefill_session import Job, WantedHistory

log = structlog.get_logger()

_TIMES_COMPUTED = 2.0
"""A READ is given up after this multiple of the time in which the tokens would be computed."""
_LEAST_WAIT_S = 1.0
"""Minimum time after which a READ is given up, in seconds."""
_UNMEASURED_WAIT_S = 10.0
"""Time after which a READ is given up if no prompt was computed before, in seconds."""


class HistoryReader:
    """Receives history of prompts into pages of the engine; see `services.worker.prefill_session`.

    Args:
        clients: sessions with decode workers.
        receiver: reads from them.
        policy: chooses what is read.
    """

    def __init__(
        self, worker: Worker, clients: PrefillClients, receiver: Receiver, policy: HistoryPolicy
    ) -> None:
        self._worker = worker
        self._clients = clients
        self._receiver = receiver
        self._policy = policy
        self._metrics = HistoryMetrics(worker.metrics.registry)
        self._tokens_per_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def wanted(self, reader: decode_pb2.WorkerAddress, job: Job) -> WantedHistory:
        """Return which KV to read; none if computing it is predicted to be faster."""
        plan, sent, request = self._worker.engine.page_plan, job.outgoing.sent, job.request
        end = min(sent.first, plan.full(len(request.tokens) - 1) * plan.page_size)
        if not end or not reader.address or self._receiver.blocked:
            return WantedHistory()
        lacking = end - self._worker.engine.cached_tokens(request, Purpose.HOLD)
        if lacking <= 0:
            return WantedHistory()
        self._tokens_per_s = self._worker.engine.load.prompt_tokens_per_s or self._tokens_per_s
        least = self._policy.least_tokens(
            reader.worker_id,
            lacking,
            token_bytes=self._bytes(SentTokens.cached(plan, end + 1, end - lacking)) / lacking,
            tokens_per_s=self._tokens_per_s,
            now=time.monotonic(),
        )
        return WantedHistory() if least is None else WantedHistory(end, least)

    def receive(self, reader: decode_pb2.WorkerAddress, job: Job, reserved: Reserved) -> None:
        """Start to read the KV from the page of ``reserved.first_token`` on."""
        job.receiving = asyncio.create_task(self._receive(reader, job, reserved))
        self._tasks.add(job.receiving)
        job.receiving.add_done_callback(self._tasks.discard)

    def forget(self, peer: str) -> None:
        """Drop the measurements of the link to a decode worker that has left."""
        self._policy.forget(peer)

    def set_gauges(self) -> None:
        """Set the gauges of the landing slots."""
        self._receiver.set_gauges()

    async def close(self) -> None:
        """End all READs and sessions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._clients.close()

    async def _receive(
        self, reader: decode_pb2.WorkerAddress, job: Job, reserved: Reserved
    ) -> None:
        """Read the KV. Then the engine computes the rest of the prompt, or all of it."""
        key = job.outgoing.key
        end = job.wanted.receives
        sent = SentTokens.cached(self._worker.engine.page_plan, end + 1, reserved.first_token)
        tokens = end - reserved.first_token
        arrived_at = 0.0

        def arrived(_: FetchTimes) -> None:
            nonlocal arrived_at
            arrived_at = time.perf_counter()
            self._worker.engine.submit(HistoryArrived(key, complete=True))

        attributes: Attributes = {
            "headrace.decode_worker": reader.worker_id,
            "headrace.tokens": tokens,
        }
        with job.outgoing.span.child("read_history", Kind.CLIENT, attributes) as span:
            fetch = Fetch(
                key=key,
                prefill=reader,
                request=_request(job.start.request, job.request.tokens[: end + 1]),
                reserved=asyncio.get_running_loop().create_future(),
                sent=sent,
                on_first=lambda _: False,
                on_verified=arrived,
                deadline_s=self._limit_s(tokens),
                cached=True,
                span=span,
            )
            fetch.reserved.set_result(reserved)
            try:
                times = await self._read(fetch)
            except FetchFailed as failure:
                span.fail(_reason(failure), failure.message)
                self._failed(job, reader, _reason(failure), failure.message)
            except Exception as error:
                log.exception("reading history failed unexpectedly", **job.outgoing.log_fields)
                span.fail("internal", repr(error))
                self._failed(job, reader, "internal", repr(error))
            else:
                times.record(span)
                span.end(arrived_at)
                self._metrics.tokens.inc(tokens)
                self._metrics.bytes.inc(times.raw_bytes)
        if not arrived_at:
            self._worker.engine.submit(HistoryArrived(key, complete=False))

    async def _read(self, fetch: Fetch) -> FetchTimes:
        """Fetch the KV, and record the speed of the link.

        Raises:
            FetchFailed: the KV did not arrive.
        """
        try:
            async with asyncio.timeout(fetch.deadline_s):
                await self._clients.connect(fetch.prefill)  # not part of the link's latency
        except TimeoutError:
            raise FetchFailed(
                error_pb2.ERROR_CODE_DEADLINE, "the decode worker did not answer in time"
            ) from None
        began = time.perf_counter()
        times = await self._receiver.fetch(fetch)
        if times.segments:
            self._policy.arrived(
                fetch.prefill.worker_id,
                times.raw_bytes,
                latency_s=times.reads.start - began,
                transfer_s=times.decodes.end - times.reads.start,
            )
        return times

    def _failed(
        self, job: Job, reader: decode_pb2.WorkerAddress, reason: str, message: str
    ) -> None:
        """Record a failure. Unless pages were missing, avoid the decode worker for a while."""
        self._metrics.failures.labels(reason).inc()
        if reason != "not_cached":
            self._policy.failed(reader.worker_id, time.monotonic())
        log.log(
            logging.INFO if reason == "not_cached" else logging.WARNING,
            "history was not read, and is computed",
            **job.outgoing.log_fields,
            worker=reader.worker_id,
            reason=message[:300],
        )

    def _limit_s(self, tokens: int) -> float:
        if not self._tokens_per_s:
            return _UNMEASURED_WAIT_S
        return max(_LEAST_WAIT_S, _TIMES_COMPUTED * tokens / self._tokens_per_s)

    def _bytes(self, sent: SentTokens) -> int:
        """Return the bytes of the pages that are sent, on all ranks."""
        sizes = self._worker.page_bytes.values()
        return sum(
            size * len(pages) for group, size in enumerate(sizes) for pages in sent.pages(group)
        )


def _reason(failure: FetchFailed) -> str:
    """Return the reason of a failure; the worker that sends the KV is a decode worker here."""
    is_lost = failure.code == error_pb2.ERROR_CODE_PREFILL_LOST
    return "decode_lost" if is_lost else failure.reason


def _request(message: request_pb2.Request, tokens: tuple[int, ...]) -> request_pb2.Request:
    """Return the request for the KV of ``tokens`` except the last one."""
    return request_pb2.Request(
        request_id=message.request_id,
        attempt=message.attempt,
        placement_id=message.placement_id,
        tokens=pack_tokens(tokens),
        prompt_tokens=len(tokens),
        sampling=sampling_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
        max_tokens=1,
        choices=1,
        cache_salt=message.cache_salt,
    )
