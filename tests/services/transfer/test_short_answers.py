"""Sequences that end while the bookkeeping of their transfer is still going on."""

import asyncio

import pytest

from headrace.v1 import error_pb2
from headrace.v1 import prefill_pb2 as pb
from services.transfer.fetch import Fetch, FetchProgress
from services.transfer.prefill_client import Subscription
from services.transfer.pulls import Pull
from services.transfer.receiver import Receiver
from tests.services.workers import Site, fetch_of, open_stream, until

TOKENS = 100


@pytest.mark.parametrize("kv_digest", [False, True])
async def test_stage_times_are_complete_and_the_transfer_is_recorded(
    site: Site, kv_digest: bool
) -> None:
    prefill = await site.prefill(kv_digest=kv_digest)
    decode = await site.decode(kv_digest=kv_digest)
    transfers = []
    for number in range(1, 21):
        stream = open_stream(decode, prefill, number, TOKENS, max_tokens=2)
        assert stream.transfer is not None
        transfers.append(stream.transfer)
        session = stream.session
        await until(lambda streams=session.streams: not streams)  # type: ignore[misc]
        delta = session.outbox.deltas[number]
        assert not delta.HasField("error")
        assert delta.stages.prefill > 0
        assert delta.stages.transfer > 0
    await asyncio.wait(transfers)
    assert not any(transfer.cancelled() for transfer in transfers)
    value = decode.worker.metrics.registry.get_sample_value
    assert value("headrace_worker_stage_seconds_count", {"stage": "transfer"}) == 20
    await until(lambda: decode.worker.engine.load.pages_free == decode.worker.engine.pages_total)


@pytest.mark.parametrize("late", ["done", "failed"])
async def test_event_after_the_last_segment_is_ignored(
    site: Site, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """It is queued in the same iteration of the event loop that verifies the last segment."""
    prefill, decode = await site.prefill(), await site.decode()
    pull_segment = Receiver._pull

    async def pull(
        self: Receiver,
        pull: Pull,
        fetch: Fetch,
        subscription: Subscription,
        progress: FetchProgress,
    ) -> None:
        def put_late_event() -> None:
            if progress.started and progress.expected == progress.times.segments + 1:
                error = error_pb2.Error(code=error_pb2.ERROR_CODE_LEASE_EXPIRED, message="late")
                events = {
                    "done": pb.PrefillEvent(done=pb.PrefillDone(segments=progress.expected)),
                    "failed": pb.PrefillEvent(failed=pb.PrefillFailed(error=error)),
                }
                subscription.put(events[late])

        loop = asyncio.get_running_loop()
        pull.done.add_done_callback(lambda _: loop.call_soon(put_late_event))
        await pull_segment(self, pull, fetch, subscription, progress)

    monkeypatch.setattr(Receiver, "_pull", pull)
    for _ in range(5):
        verified: list[object] = []
        fetch = fetch_of(prefill, TOKENS)
        fetch.on_verified = verified.append
        assert (await decode.worker.receiver.fetch(fetch)).segments == 4
        assert len(verified) == 1
