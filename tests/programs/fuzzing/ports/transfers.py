"""A transfer that was recorded between two workers, and its replay into another decode worker."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from headrace.v1 import decode_pb2, error_pb2
from headrace.v1 import prefill_pb2 as pb
from services.transfer.agent import ReadDone
from services.transfer.announced import AnnouncedSegments
from services.transfer.codec_calls import CodecCalls
from services.transfer.errors import BadAddress
from services.transfer.fetch import Fetch, FetchFailed
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.metrics import TransferMetrics
from services.transfer.prefill_client import PrefillClient, routes_from
from services.transfer.receiver import Receiver
from services.transfer.slab import Slab
from tests.programs.fuzzing.ports.base import Wrong
from tests.services.transfer.test_notifications import MutedAgent
from tests.services.workers import SLOT_BYTES, Site, fetch_of, load

TOKENS = 40  # two segments
SPINS = 200  # iterations of the event loop in which a replay settles; it waits for no other thread

Step = Callable[[], None]


@dataclass
class Recorded:
    """One transfer, without notifications.

    Attributes:
        events: all events of the sequence, in order.
        slab: content of the sender's slab, ``[nbytes]`` uint8.
        fetch: arguments of the fetch.
    """

    welcome: pb.Welcome
    events: list[pb.PrefillEvent]
    slab: torch.Tensor
    fetch: Fetch


async def record() -> Recorded:
    """Return a transfer between two real workers."""
    site = Site()
    events = []
    dispatch = PrefillClient._dispatch

    def keep(client: PrefillClient, event: pb.PrefillEvent) -> None:
        events.append(event)
        dispatch(client, event)

    try:
        prefill = await site.prefill(MutedAgent, codec="splitzip")
        decode = await site.decode(codec="splitzip")
        clients = decode.worker.receiver._clients
        welcome = (await clients.connect(prefill.address)).welcome
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PrefillClient, "_dispatch", keep)
            fetch = fetch_of(prefill, TOKENS)
            fetch.deadline_s = 120.0  # the first transfer in a new environment compiles kernels
            await decode.worker.receiver.fetch(fetch)
        return Recorded(welcome, events, prefill.slab.buffer.clone(), fetch)
    finally:
        await site.close()


class FakeAgent:
    """Runs everything at once on the calling thread, and READs from the recorded slab."""

    name = "decode"
    metadata = connection_metadata = b""

    def __init__(self, recorded: Recorded) -> None:
        self.slab = recorded.slab.clone()
        self.fault = Future[None]()
        self._address = recorded.welcome.endpoints[0].slab_address
        self._calls = CodecCalls(on_gpu=False)
        self.listener: AnnouncedSegments | None = None

    def register(self, slab: Slab) -> None:
        pass

    def listen(self, listener: AnnouncedSegments) -> None:
        self.listener = listener

    def wake(self) -> None:
        pass

    def codec_idle(self) -> "Future[None]":
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def run_codec(self, job: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with torch.inference_mode():
            self._calls.add(job, future)
            while not future.done():
                self._calls.start_queued()
                self._calls.poll()
        return future

    def read(
        self, peer: str, address: int, length: int, local: torch.Tensor, **_: Any
    ) -> "Future[ReadDone]":
        future: Future[ReadDone] = Future()
        first = address - self._address
        if not 0 <= first <= first + length <= self.slab.numel():
            future.set_exception(BadAddress("outside the registered memory"))
        else:
            local.copy_(self.slab[first : first + length])
            future.set_result(ReadDone(1e-4, 1e-4))
        return future


class Replay:
    """A receiver, whose sender is the recorded one."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.agent = FakeAgent(recorded)
        loaded = load(codebooks=True)
        self._planes = list(loaded.rank.executor.cache.planes)
        endpoint = self._endpoint = LocalEndpoint(
            loaded.rank.executor.cache,
            loaded.rank.codecs,
            Slab(8, SLOT_BYTES),
            self.agent,  # type: ignore[arg-type]
        )
        self.receiver = Receiver(
            (endpoint,),
            self,  # type: ignore[arg-type]
            credits_per_sequence=8,
            read_timeout_s=1.0,
            metrics=TransferMetrics(CollectorRegistry()),
        )
        self._sequences = count(1)
        self._client: PrefillClient | None = None
        self._kept: list[torch.Tensor] | None = None

    async def connect(self, worker: decode_pb2.WorkerAddress) -> PrefillClient:
        """Return a session without a connection."""
        welcome = self.recorded.welcome
        routes = routes_from(welcome, [self._endpoint])
        self._client = PrefillClient(worker, welcome, routes, self._sequences)
        return self._client

    async def run(self, steps_of: Callable[[PrefillClient, int], list[Step]]) -> str:
        """Fetch once and return the outcome.

        Args:
            steps_of: returns what happens, given the session and the number of the sequence.

        Raises:
            Wrong: the fetch succeeded with other KV, failed with an unexpected error, or keeps
                landing slots.
        """
        for plane in self._planes:
            plane.fill_(7)
        recorded = self.recorded.fetch
        fetch = Fetch(
            key=recorded.key,
            prefill=recorded.prefill,
            request=recorded.request,
            reserved=recorded.reserved,
            sent=recorded.sent,
            on_first=lambda first: False,
            on_verified=lambda times: None,
            deadline_s=60.0,
        )
        fetching = asyncio.create_task(self.receiver.fetch(fetch))
        await _spin(lambda: self._client is not None and bool(self._client._subscriptions))
        client = self._client
        assert client is not None
        self._client = None
        for step in steps_of(client, next(iter(client._subscriptions))):
            step()
            await _spin(fetching.done, 4)
        await _spin(fetching.done, SPINS)
        for subscription in client._subscriptions.values():
            subscription.put(FetchFailed(error_pb2.ERROR_CODE_PREFILL_LOST, "the session ended"))
        outcome = await self._outcome(fetching)
        landing = self.receiver.landing[0]
        await _spin(lambda: not landing.held and not landing.quarantined)
        if landing.held or landing.quarantined or self.receiver.announced.waiting:
            raise Wrong(f"{outcome}: {landing.held} slots held, {landing.quarantined} quarantined")
        return outcome

    async def _outcome(self, fetching: "asyncio.Task[Any]") -> str:
        try:
            await fetching
        except FetchFailed as failure:
            if failure.code == error_pb2.ERROR_CODE_INTERNAL:
                raise Wrong(f"a fetch failed with an internal error: {failure}") from failure
            known = failure.code in error_pb2.ErrorCode.values()
            return error_pb2.ErrorCode.Name(failure.code)[11:] if known else "unknown code"
        planes = [plane.clone() for plane in self._planes]
        if self._kept is None:
            self._kept = planes
        if not all(map(torch.equal, planes, self._kept)):
            raise Wrong("a fetch succeeded with other KV")
        return "right"


async def _spin(condition: Callable[[], bool], limit: int = SPINS) -> None:
    for _ in range(limit):
        if condition():
            return
        await asyncio.sleep(0)
