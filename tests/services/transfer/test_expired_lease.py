"""A READ that is slower than its lease ends with LEASE_EXPIRED, not with INTEGRITY."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from headrace.v1 import error_pb2
from headrace.v1 import prefill_pb2 as pb
from services.transfer import receiver
from services.transfer.agent import ReadDone, TransferAgent
from services.transfer.prefill_client import PrefillClient
from tests.services.workers import LIMIT_S, Site, open_stream, output_of, until


class LateReads(TransferAgent):
    """Starts READs only after `start_all`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.late: list[tuple[Callable[[], Future[ReadDone]], Future[ReadDone]]] = []

    def read(self, *args: object, **kwargs: object) -> "Future[ReadDone]":
        done: Future[ReadDone] = Future()
        self.late.append((partial(super().read, *args, **kwargs), done))  # type: ignore[arg-type]
        return done

    def start_all(self) -> None:
        for start, done in self.late:
            start().add_done_callback(partial(_copy, done))


def _copy(to: "Future[ReadDone]", done: "Future[ReadDone]") -> None:
    to.set_result(done.result())


class RecordedReads(TransferAgent):
    """Records the deadlines of READs."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.deadlines: set[float] = set()

    def read(self, *args: Any, deadline_s: float, **kwargs: Any) -> "Future[ReadDone]":
        self.deadlines.add(deadline_s)
        return super().read(*args, deadline_s=LIMIT_S, **kwargs)


@pytest.mark.parametrize(("lease_s", "read_timeout_s", "expected"), [(30, 10, 10), (4, 10, 3)])
async def test_reads_are_overdue_before_the_lease_of_their_sender_expires(
    site: Site, lease_s: float, read_timeout_s: float, expected: float
) -> None:
    prefill = await site.prefill(lease_s=lease_s)
    decode = await site.decode(RecordedReads, read_timeout_s=read_timeout_s)
    stream = open_stream(decode, prefill, 1, 20)
    await until(lambda: decode.worker.idle)
    assert not output_of(stream.session).HasField("error")
    assert isinstance(decode.agent, RecordedReads)
    assert decode.agent.deadlines == {expected}


async def test_segment_of_an_expired_lease_is_no_integrity_failure(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader verifies the segments before it receives the message of the expiry."""
    monkeypatch.setattr(receiver, "_REASON_S", LIMIT_S, raising=False)
    dispatch = PrefillClient._dispatch
    delayed = list[Callable[[], None]]()

    def delay(client: PrefillClient, event: pb.PrefillEvent) -> None:
        if event.WhichOneof("event") == "failed":
            delayed.append(partial(dispatch, client, event))
        else:
            dispatch(client, event)

    monkeypatch.setattr(PrefillClient, "_dispatch", delay)
    prefill = await site.prefill(lease_s=0.01)
    monkeypatch.setattr(receiver, "_LEASE_SHARE", math.inf)
    late, other = await site.decode(LateReads, read_timeout_s=LIMIT_S), await site.decode()
    agent, sender = late.agent, prefill.worker.sender
    assert isinstance(agent, LateReads)
    stream = open_stream(late, prefill, 1, 100)
    await until(lambda: len(agent.late) == 2)
    while sender.active:
        sender.expire()
        await asyncio.sleep(0.005)
    await until(lambda: bool(delayed))
    open_stream(other, prefill, 1, 200)  # its segments use all slots again
    await until(lambda: other.worker.idle)
    agent.start_all()
    await until(lambda: all(done.done() for _, done in agent.late))
    await asyncio.wrap_future(agent.codec_idle())
    await asyncio.sleep(0.01)
    delayed[0]()
    await until(lambda: late.worker.idle)
    assert output_of(stream.session).error.code == error_pb2.ERROR_CODE_LEASE_EXPIRED
    failures = late.worker.metrics.registry.get_sample_value("headrace_kv_integrity_failures_total")
    assert failures == 0
