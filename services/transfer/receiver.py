"""The decode worker's half of a transfer: request a prefill, READ its segments, verify, decode.

The reader drives the transfer. It grants credits for free landing slots, prepares a pull for each
announced segment, reads it as soon as it is ready, and acknowledges it. The pages join a page table
only after all segments have been verified.

The reader pulls (READ), and the sender does not push (WRITE). The reader knows when it has pages
and a landing slot. A READ completes on the worker that uses the KV, so that no further message is
needed. And only READs that the reader has started write to its landing slots, so that it knows when
a slot may be reused. A sender that hangs, or acts on a request that has ended, cannot overwrite it.

Each rank of a worker has a landing slab with credits of its own, and reads the KV heads of its
cache from all ranks of the sender that have them.
"""

import asyncio
import math
from contextlib import suppress
from functools import partial

import codec
from headrace.v1 import error_pb2
from headrace.v1 import prefill_pb2 as pb
from services.transfer.announced import AnnouncedSegments
from services.transfer.errors import (
    ForeignSegment,
    FrameError,
    PeerLost,
    TransferClosed,
    TransferError,
)
from services.transfer.extent import Extent
from services.transfer.fetch import Fetch, FetchFailed, FetchProgress, FetchTimes
from services.transfer.landing_slots import LandingSlots
from services.transfer.local_endpoint import Endpoints
from services.transfer.manifest import Coverage
from services.transfer.metrics import TransferMetrics
from services.transfer.prefill_client import PrefillClient, PrefillClients, Subscription
from services.transfer.pulls import Pull
from services.transfer.shares import single_share

_LAUNCH_S = 1.5e-3
"""Delay of the acknowledgement when the KV of a sequence is complete, in seconds, so that the
engine's thread gets the interpreter lock to launch the first step."""

_LEASE_SHARE = 0.75
"""Share of the lease time after which READs are overdue.

The rest allows for a lease whose timer started before the READ.
"""

_REASON_S = 0.5
"""Seconds to wait for the sender's reason after a segment failed verification. If the lease expired
during the READ, the slot may already hold another sequence, and the sender reports the expiry.
"""


class Receiver:
    """Owns the slots of the landing slabs, and their credits. Endpoints READ and decode.

    Args:
        endpoints: endpoint of each rank; the first receives notifications.
        slots: slots of each slab for segments that are received; default: all.
        credits_per_sequence: maximum number of segments of one sequence in flight on a rank.
        read_timeout_s: seconds without the end of any READ from a peer after which its READs are
            overdue.

    Attributes:
        landing: landing slots of each rank.
        announced: announced segments that are not ready yet.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        clients: PrefillClients,
        *,
        credits_per_sequence: int,
        read_timeout_s: float,
        metrics: TransferMetrics,
        slots: range | None = None,
    ) -> None:
        self._endpoints = endpoints
        self.landing = [
            LandingSlots(
                slots or range(endpoint.readable.slots),
                credits_per_sequence,
                partial(self._grant, rank),
            )
            for rank, endpoint in enumerate(endpoints)
        ]
        self._clients = clients
        self._metrics = metrics
        self._subscriptions: dict[str, Subscription] = {}
        self._read_timeout_s = read_timeout_s
        self.announced = AnnouncedSegments(on_waiting=endpoints[0].agent.wake)
        endpoints[0].agent.listen(self.announced)

    async def fetch(self, fetch: Fetch) -> FetchTimes:
        """Fetch a prompt's KV into reserved pages; return when all of it is verified.

        Nothing writes to the pages after this has returned or raised.

        Raises:
            FetchFailed: the KV did not arrive; the content of the pages is undefined.
        """
        try:
            start = asyncio.get_running_loop().time()
            async with asyncio.timeout(fetch.deadline_s):
                client = await self._clients.connect(fetch.prefill)
                spent_s = asyncio.get_running_loop().time() - start
                return await self._run(fetch, client, fetch.deadline_s - spent_s)
        except TimeoutError:
            raise FetchFailed(
                error_pb2.ERROR_CODE_DEADLINE, "the request's deadline passed"
            ) from None
        except ExceptionGroup as group:
            raise _first_failure(group, fetch.prefill.worker_id) from group

    @property
    def blocked(self) -> str | None:
        """Return why this worker should receive no more requests, or None.

        The reason is overdue READs in more than three quarters of the landing slots of a rank. One
        prefill worker that has stopped cannot hold that many slots, but several can.
        """
        for landing in self.landing:
            if landing.overdue > single_share(landing.slots):
                return (
                    f"{landing.overdue} of {landing.slots} landing slots are held by prefill "
                    "workers that do not answer"
                )
        return None

    def set_gauges(self) -> None:
        """Set the gauges of the landing slots."""
        gauge = self._metrics.landing_slots
        gauge.labels("held").set(sum(landing.held for landing in self.landing))
        gauge.labels("quarantined").set(sum(landing.quarantined for landing in self.landing))

    async def _run(self, fetch: Fetch, client: PrefillClient, deadline_s: float) -> FetchTimes:
        progress = FetchProgress(self._coverages(fetch, client))
        with client.subscribe() as subscription:
            self._subscriptions[fetch.key] = subscription
            try:
                subscription.send_start(fetch, deadline_s)
                async with asyncio.TaskGroup() as pulls:
                    await self._follow(fetch, subscription, progress, pulls)
                if progress.ended:
                    await self._stop_decodes(fetch)
            except BaseException:
                await self._stop_decodes(fetch)
                raise
            finally:
                for landing in self.landing:
                    landing.leave(fetch.key)
                del self._subscriptions[fetch.key]
        if not progress.ended and not progress.covered:
            raise FetchFailed(
                error_pb2.ERROR_CODE_INTEGRITY,
                "segments are missing from the manifest",
                fetch.prefill.worker_id,
            )
        if not progress.ended:
            self._metrics.received_tokens.inc(fetch.sent.computed - fetch.sent.first)
        return progress.times

    def _coverages(self, fetch: Fetch, client: PrefillClient) -> list[Coverage]:
        """Return the KV that each rank needs of a sequence, none of which is announced yet."""
        return [
            Coverage(
                fetch.sent,
                endpoint.layout,
                first_kv_head=endpoint.kv_heads.start,
                split=rank in client.split,
            )
            for rank, endpoint in enumerate(self._endpoints)
        ]

    async def _follow(
        self,
        fetch: Fetch,
        subscription: Subscription,
        progress: FetchProgress,
        group: asyncio.TaskGroup,
    ) -> None:
        """Process events, and pull segments in tasks of ``group``, until the fetch is complete."""
        while not progress.complete:
            try:
                event = await subscription.next_event()
            except FetchFailed:
                if not progress.complete:
                    raise
                return
            if event is None or progress.complete:  # completed while the event was queued
                continue
            if event.WhichOneof("event") == "segment":
                self._start_pull(event.segment, fetch, subscription, progress, group)
            else:
                self._apply(event, fetch, subscription, progress)
        if progress.ended:
            for task in progress.pulls:
                task.cancel()

    def _apply(
        self,
        event: pb.PrefillEvent,
        fetch: Fetch,
        subscription: Subscription,
        progress: FetchProgress,
    ) -> None:
        match event.WhichOneof("event"):
            case "computing":  # a prompt that is only queued must not hold landing slots
                if progress.computing:
                    raise ForeignSegment("the start of the computation was announced twice")
                progress.computing = True
                fetch.reserved.add_done_callback(lambda _: self._join(fetch))
            case "scored":
                if fetch.on_scored is None or progress.started:
                    raise ForeignSegment("unexpected log probabilities of prompt tokens")
                fetch.on_scored(event.scored.logprobs)
            case "first_tokens":
                first = event.first_tokens
                if not (0 <= first.queue_s < math.inf and 0 <= first.prefill_s < math.inf):
                    raise ForeignSegment(
                        f"implausible times: {first.queue_s} s, {first.prefill_s} s"
                    )
                choices = sorted(token.choice for token in first.tokens)
                expected = fetch.request.choices if fetch.sent.samples_first else 0
                if progress.started or choices != list(range(expected)):
                    raise ForeignSegment(f"unexpected first tokens, of choices {choices}")
                progress.started = True
                progress.ended = fetch.on_first(first)
                self._check_verified(fetch, progress)
            case "ready":
                sender = _rank_of(subscription.client.welcome, event.ready.rank)
                self.announced.ready(sender.agent_name, event.ready)
            case "done":
                if progress.expected is not None:
                    raise ForeignSegment("the number of segments was announced twice")
                announced = len(progress.pulls)
                if event.done.segments < announced:
                    raise ForeignSegment(
                        f"{event.done.segments} segments in total, but {announced} were announced"
                    )
                evicted = fetch.sent.evicted
                if event.done.evicted_tokens != evicted:
                    raise ForeignSegment(
                        f"{event.done.evicted_tokens} tokens were evicted, not {evicted}"
                    )
                progress.expected = event.done.segments
                self._check_verified(fetch, progress)
            case "failed":
                error = event.failed.error
                raise FetchFailed(
                    error.code, error.message, error.worker_id or fetch.prefill.worker_id
                )

    def _join(self, fetch: Fetch) -> None:
        """Queue a sequence that has pages for landing slots; if the fetch has ended, do nothing."""
        if fetch.key in self._subscriptions and not fetch.closed and not fetch.reserved.cancelled():
            for landing in self.landing:
                landing.join(fetch.key, fetch.prefill.worker_id)

    async def _stop_decodes(self, fetch: Fetch) -> None:
        """Close a fetch and wait for its decodes in progress, even if this task is cancelled again.

        READs may continue, since they do not touch the pages.
        """
        # From now on, no decode is started.
        fetch.closed = True
        idle = [asyncio.wrap_future(each.codec_idle()) for each in self._endpoints]
        while not all(each.done() for each in idle):
            with suppress(asyncio.CancelledError):
                await asyncio.wait(idle)
        for error in [each.exception() for each in idle]:
            if error is not None and not isinstance(error, TransferClosed):
                raise error

    def _start_pull(
        self,
        segment: pb.Segment,
        fetch: Fetch,
        subscription: Subscription,
        progress: FetchProgress,
        group: asyncio.TaskGroup,
    ) -> None:
        """Assign a landing slot to an announced segment, and read it as soon as it is ready."""
        announced = len(progress.pulls)
        if segment.index != announced or segment.index == progress.expected:
            raise FetchFailed(
                error_pb2.ERROR_CODE_INTEGRITY,
                f"segment {segment.index} announced after {announced} segments",
                fetch.prefill.worker_id,
            )
        welcome = subscription.client.welcome
        sender = _rank_of(welcome, segment.rank)
        if segment.slot >= sender.slots:
            raise ForeignSegment(f"slot {segment.slot} does not exist; there are {sender.slots}")
        if segment.reader_rank >= len(self._endpoints):
            raise ForeignSegment(f"this worker has no rank {segment.reader_rank}")
        if not fetch.reserved.done():
            raise ForeignSegment("a segment was announced without a credit")
        extent = Extent.of(segment)
        rank = segment.reader_rank
        pages = progress.coverages[rank].add(extent)
        page_group = self._endpoints[0].layout.groups[extent.plane_group].page_group
        target = fetch.reserved.result().page_tables[page_group][pages.start : pages.stop]
        endpoint, landing = self._endpoints[rank], self.landing[rank]
        # READs are overdue before the sender's lease expires. Otherwise the sender could reuse a
        # slot during a READ, and a slow link would look like damaged data.
        pull = Pull(
            self.announced,
            endpoint,
            sender,
            segment,
            target,
            fetch,
            welcome,
            deadline_s=min(self._read_timeout_s, _LEASE_SHARE * welcome.lease_s),
        )
        slot = landing.land(fetch.key)
        pull.start(slot)

        def free(_: "asyncio.Task[None]") -> None:
            landing.free_after(slot, fetch.key, None if pull.cancel() else pull.done)

        task = group.create_task(self._pull(pull, fetch, subscription, progress))
        task.add_done_callback(free)
        progress.pulls.append(task)

    async def _pull(
        self, pull: Pull, fetch: Fetch, subscription: Subscription, progress: FetchProgress
    ) -> None:
        """Wait until a segment is verified and in the pages, then acknowledge it."""
        try:
            pulled = await asyncio.shield(pull.done)
        except PeerLost:
            subscription.client.disconnect()
            raise
        except (codec.CodecError, FrameError):
            await asyncio.sleep(_REASON_S)  # cancelled if the sender's reason ends the fetch
            self._metrics.integrity_failures.inc()
            raise
        ready, read = pulled.ready, pulled.read
        progress.times.add(ready, read.seconds, pulled.decode_s, pulled.ended)
        self._check_verified(fetch, progress)
        if progress.reported:
            await asyncio.sleep(_LAUNCH_S)
        subscription.acknowledge(ready.index, read.busy_s, pulled.codec_s)
        subscription.put(None)
        self._metrics.received(ready.raw_bytes, ready.length, read.seconds, pulled.decode_s)

    def _check_verified(self, fetch: Fetch, progress: FetchProgress) -> None:
        """If all KV is verified and this was not reported yet, call `Fetch.on_verified`."""
        complete = progress.complete and progress.covered and not progress.ended
        if complete and not progress.reported:
            progress.reported = True
            fetch.on_verified(progress.times)

    def _grant(self, rank: int, key: str, segments: int) -> None:
        self._subscriptions[key].credit(rank, segments)


def _rank_of(welcome: pb.Welcome, rank: int) -> pb.Endpoint:
    """Return the endpoint of a rank of the sender.

    Raises:
        ForeignSegment: there is no such rank.
    """
    if rank >= len(welcome.endpoints):
        raise ForeignSegment(f"rank {rank} does not exist; there are {len(welcome.endpoints)}")
    return welcome.endpoints[rank]


def _first_failure(group: "ExceptionGroup[Exception]", worker_id: str) -> Exception:
    """Return the first error of a group. Expected errors are converted to `FetchFailed`.

    Any other error is a bug and is returned unchanged.
    """
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FetchFailed):
        return error
    if isinstance(error, codec.CodecError | FrameError):
        return FetchFailed(
            error_pb2.ERROR_CODE_INTEGRITY, f"KV failed verification: {error}", worker_id
        )
    if isinstance(error, TransferClosed):
        return FetchFailed(error_pb2.ERROR_CODE_INTERNAL, str(error))  # of this worker's own agent
    if isinstance(error, PeerLost):
        return FetchFailed(error_pb2.ERROR_CODE_PREFILL_LOST, str(error), worker_id)
    if isinstance(error, TransferError):
        return FetchFailed(error_pb2.ERROR_CODE_TRANSFER_FAILED, str(error), worker_id)
    return error
