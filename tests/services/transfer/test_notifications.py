"""Segments that are ready are read once, whether a notification or the session's event says so."""

import asyncio
from concurrent.futures import Future
from unittest.mock import Mock

import pytest

from headrace.v1 import prefill_pb2 as pb
from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.announced import AnnouncedSegments
from services.transfer.errors import BadAddress, PeerRefused
from services.transfer.fetch import FetchFailed
from services.transfer.local_endpoint import LocalEndpoint
from services.transfer.prefill_client import Subscription
from tests.services.workers import LIMIT_S, Site, fetch_of, until

TOKENS = 100  # four segments
SEGMENT = pb.Segment(sequence=1, index=2, nonce=3)
READY = pb.SegmentReady(sequence=1, index=2, nonce=3, length=100)


class CountedReads(TransferAgent):
    """Counts READs."""

    reads = 0

    def read(self, *args: object, **kwargs: object) -> "Future[ReadDone]":
        self.reads += 1
        return super().read(*args, **kwargs)  # type: ignore[arg-type]


class MutedAgent(TransferAgent):
    """Sends no notifications."""

    def notify(self, peer: str, message: bytes) -> None:
        pass


def announced() -> tuple[AnnouncedSegments, list[pb.SegmentReady], list[None]]:
    """Return segments, with `SEGMENT` of agent "a", its starts, and the calls to wake."""
    wakes: list[None] = []
    segments = AnnouncedSegments(on_waiting=lambda: wakes.append(None))
    starts: list[pb.SegmentReady] = []
    segments.add("a", SEGMENT, starts.append)
    return segments, starts, wakes


def test_first_message_starts_the_read_and_the_second_is_ignored() -> None:
    segments, starts, wakes = announced()
    assert segments.waiting
    assert len(wakes) == 1
    segments.notified("a", READY.SerializeToString())
    segments.ready("a", READY)
    assert starts == [READY]
    assert not segments.waiting


@pytest.mark.parametrize(
    ("peer", "ready"),
    [
        ("b", READY),
        ("a", pb.SegmentReady(sequence=2, index=2, nonce=3)),
        ("a", pb.SegmentReady(sequence=1, index=1, nonce=3)),
        ("a", pb.SegmentReady(sequence=1, index=2, nonce=4)),
    ],
    ids=["another agent", "another sequence", "another segment", "a forged nonce"],
)
def test_notification_of_something_else_is_ignored(peer: str, ready: pb.SegmentReady) -> None:
    segments, starts, _ = announced()
    segments.notified(peer, ready.SerializeToString())
    assert starts == []
    assert segments.waiting


def test_malformed_notification_is_ignored() -> None:
    segments, starts, _ = announced()
    segments.notified("a", b"\xff\xff\xff")
    assert starts == []
    assert segments.waiting


def test_discarded_segment_is_not_read() -> None:
    segments, starts, _ = announced()
    assert segments.discard("a", SEGMENT)
    segments.ready("a", READY)
    assert starts == []
    assert not segments.discard("a", SEGMENT)


@pytest.mark.parametrize("nonce", [3, 4], ids=["genuine", "forged"])
def test_notification_before_the_announcement_is_kept(nonce: int) -> None:
    segments = AnnouncedSegments(on_waiting=lambda: None)
    early = pb.SegmentReady(sequence=1, index=2, nonce=nonce)
    segments.notified("a", early.SerializeToString())
    starts: list[pb.SegmentReady] = []
    segments.add("a", SEGMENT, starts.append)
    assert starts == ([early] if nonce == SEGMENT.nonce else [])
    assert segments.waiting == (nonce != SEGMENT.nonce)


def test_early_notifications_are_bounded() -> None:
    segments = AnnouncedSegments(on_waiting=lambda: None)
    for index in range(10_000):
        segments.notified("a", pb.SegmentReady(index=index).SerializeToString())
    assert len(segments._early) == 256


async def test_notifications_alone_start_all_reads(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    put = Subscription.put

    def put_unless_ready(self: Subscription, event: pb.PrefillEvent | FetchFailed | None) -> None:
        if not (isinstance(event, pb.PrefillEvent) and event.HasField("ready")):
            put(self, event)

    monkeypatch.setattr(Subscription, "put", put_unless_ready)
    times = await decode.worker.receiver.fetch(fetch_of(prefill, TOKENS))
    assert times.segments == 4


async def test_events_alone_start_all_reads(site: Site) -> None:
    prefill, decode = await site.prefill(MutedAgent), await site.decode()
    times = await decode.worker.receiver.fetch(fetch_of(prefill, TOKENS))
    assert times.segments == 4


async def test_each_segment_is_read_once(site: Site) -> None:
    prefill, decode = await site.prefill(), await site.decode(CountedReads)
    await decode.worker.receiver.fetch(fetch_of(prefill, TOKENS))
    assert isinstance(decode.agent, CountedReads)
    assert decode.agent.reads == 4


async def test_decoding_starts_before_segments_are_acknowledged(site: Site) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    fetch = fetch_of(prefill, TOKENS)
    in_use: list[int] = []
    fetch.on_verified = lambda times: in_use.append(decode.worker.receiver.landing[0].held)
    await decode.worker.receiver.fetch(fetch)
    assert len(in_use) == 1
    assert in_use[0] >= 1, "the last segment's slot is freed later"


async def test_sequence_that_ends_with_its_first_token_waits_for_no_segment(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segments may never be encoded, because the prefill worker drops the sequence."""
    prefill, decode = await site.prefill(), await site.decode()
    never: Future[None] = Future()
    monkeypatch.setattr(prefill.agent, "run_codec", lambda job: never)
    fetch = fetch_of(prefill, TOKENS)
    fetch.on_first = lambda first: True
    verified: list[None] = []
    fetch.on_verified = lambda times: verified.append(None)
    times = await asyncio.wait_for(decode.worker.receiver.fetch(fetch), LIMIT_S)
    assert times.segments == 0
    assert verified == []
    landing = decode.worker.receiver.landing[0]
    await until(lambda: (landing.held, landing.quarantined) == (0, 0))


async def test_failure_to_start_a_decode_fails_the_fetch_and_frees_its_slots(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await site.prefill(), await site.decode()

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no memory")

    receiver = decode.worker.receiver
    with monkeypatch.context() as patched:
        patched.setattr(LocalEndpoint, "decode", fail)
        with pytest.raises(MemoryError):
            await asyncio.wait_for(receiver.fetch(fetch_of(prefill, TOKENS)), LIMIT_S)
    await until(lambda: (receiver.landing[0].held, receiver.landing[0].quarantined) == (0, 0))
    assert (await receiver.fetch(fetch_of(prefill, TOKENS))).segments == 4


async def test_decode_workers_memory_is_not_offered_to_prefill_workers(site: Site) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    prefill.agent.add_peer(decode.agent.name, decode.agent.connection_metadata).result(30)
    landing, own = decode.slab, prefill.slab
    reading = prefill.agent.read(
        decode.agent.name, landing.address, 64, own.view(0, 64), deadline_s=5
    )
    with pytest.raises(BadAddress):
        await asyncio.wrap_future(reading)


async def test_second_session_of_an_agent_keeps_its_notifications(site: Site) -> None:
    """The decode worker reconnected, but the end of its earlier session is noticed later."""
    prefill, decode = await site.prefill(), await site.decode()
    reader = decode.worker._hello.endpoints[0]
    earlier = Mock(peer="decode", agent=reader.agent_name)
    service = prefill.worker.prefills
    await service._connect(earlier, reader)
    service._sessions.append(earlier)
    assert (await decode.worker.receiver.fetch(fetch_of(prefill, TOKENS))).segments == 4
    service._sessions.remove(earlier)
    service._forget(earlier)
    adding = prefill.agent.add_peer(reader.agent_name, reader.agent_metadata)
    with pytest.raises(PeerRefused, match="added already"):
        adding.result(LIMIT_S)
