"""Segments that are ready are read once, whether a notification or the session's event says so."""

import asyncio
from concurrent.futures import Future

import pytest

from headrace.v1 import prefill_pb2 as pb
from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.announced import AnnouncedSegments
from services.transfer.fetch import FetchFailed
from services.transfer.prefill_client import Subscription
from tests.services.workers import LIMIT_S, Site, fetch_of, until

TOKENS = 100  # four segments


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
    """Return segments with sequence 1, index 2 of agent "a", its starts, and the calls to wake."""
    wakes: list[None] = []
    segments = AnnouncedSegments(on_waiting=lambda: wakes.append(None))
    starts: list[pb.SegmentReady] = []
    segments.add("a", pb.Segment(sequence=1, index=2), starts.append)
    return segments, starts, wakes


def test_first_message_starts_the_read_and_the_second_is_ignored() -> None:
    segments, starts, wakes = announced()
    ready = pb.SegmentReady(sequence=1, index=2, length=100)
    assert segments.waiting
    assert len(wakes) == 1
    segments.notified("a", ready.SerializeToString())
    segments.ready("a", ready)
    assert starts == [ready]
    assert not segments.waiting


@pytest.mark.parametrize(
    ("peer", "ready"),
    [
        ("b", pb.SegmentReady(sequence=1, index=2)),
        ("a", pb.SegmentReady(sequence=2, index=2)),
        ("a", pb.SegmentReady(sequence=1, index=1)),
    ],
    ids=["another agent", "another sequence", "another segment"],
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
    segment = pb.Segment(sequence=1, index=2)
    assert segments.discard("a", segment)
    segments.ready("a", pb.SegmentReady(sequence=1, index=2))
    assert starts == []
    assert not segments.discard("a", segment)


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
    fetch.on_verified = lambda: in_use.append(decode.worker.receiver.landing.held)
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
    fetch.on_verified = lambda: verified.append(None)
    times = await asyncio.wait_for(decode.worker.receiver.fetch(fetch), LIMIT_S)
    assert times.segments == 0
    assert verified == []
    landing = decode.worker.receiver.landing
    await until(lambda: (landing.held, landing.quarantined) == (0, 0))
