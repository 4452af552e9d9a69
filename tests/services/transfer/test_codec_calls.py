"""Codec jobs: order, shared calls, errors of single jobs."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

import codec
from services.transfer.codec_calls import CodecCalls, CodecJob, Timed
from services.transfer.errors import TransferClosed


@dataclass
class Call:
    """A `codec.Pending` that ends when the test sets ``done``."""

    value: object
    done: bool = False
    seconds: float = 0.25

    def result(self) -> object:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@dataclass(eq=False)
class Codec:
    """Records its calls. The segment "invalid" is refused, and 13 ends with an error."""

    batches: list[list[Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def start(self, paged: codec.PagedCodec, segments: Sequence[Any]) -> list[Call]:
        if "invalid" in segments:
            raise codec.InvalidPages("invalid")
        self.batches.append(list(segments))
        made = [Call(codec.ChecksumMismatch("13") if s == 13 else s) for s in segments]
        self.calls += made
        return made

    def job(self, segment: Any, *, needed: bool = True) -> CodecJob[object]:
        paged = cast(codec.PagedCodec, self)
        return CodecJob(paged, self.start, segment, lambda: needed, Call.result)


Result = Future[Timed[object] | None]


def futures_of(
    calls: CodecCalls, *jobs: CodecJob[object] | None
) -> list["Future[Timed[object] | None]"]:
    futures: list[Future[Timed[object] | None]] = [Future() for _ in jobs]
    for job, future in zip(jobs, futures, strict=True):
        calls.add(job, future)
    calls.start_queued()
    return futures


def test_jobs_of_one_codec_share_calls_on_a_gpu() -> None:
    first, second = Codec(), Codec()
    jobs = [*(first.job(n) for n in range(6)), second.job("b"), first.job("c")]
    futures_of(CodecCalls(on_gpu=True), *jobs)
    assert first.batches == [[0, 1, 2, 3], [4, 5], ["c"]]
    assert second.batches == [["b"]]


def test_jobs_have_their_own_calls_on_a_cpu() -> None:
    only = Codec()
    futures_of(CodecCalls(on_gpu=False), *(only.job(n) for n in range(3)))
    assert only.batches == [[0], [1], [2]]


def test_futures_are_settled_in_order() -> None:
    only = Codec()
    calls = CodecCalls(on_gpu=False)
    one, omitted, two, idle = futures_of(
        calls, only.job(1), only.job(9, needed=False), only.job(2), None
    )
    only.calls[1].done = True
    assert not calls.poll()
    assert not any(future.done() for future in (one, omitted, two, idle))
    only.calls[0].done = True
    assert calls.poll()
    assert [f.result(0) for f in (one, omitted, two, idle)] == [
        Timed(1, 0.25), None, Timed(2, 0.25), None
    ]  # fmt: skip
    assert len(calls) == 0


def test_job_that_fails_does_not_affect_its_batch() -> None:
    only = Codec()
    calls = CodecCalls(on_gpu=True)
    good, refused, wrong, last = futures_of(calls, *map(only.job, (1, "invalid", 13, 2)))
    for call in only.calls:
        call.done = True
    calls.poll()
    assert isinstance(refused.exception(0), codec.InvalidPages)
    assert isinstance(wrong.exception(0), codec.ChecksumMismatch)
    assert [good.result(0), last.result(0)] == [Timed(1, 0.25), Timed(2, 0.25)]


def test_close_fails_what_has_not_ended() -> None:
    only = Codec()
    calls = CodecCalls(on_gpu=True)
    (running,) = futures_of(calls, only.job(1))
    queued: Result = Future()
    calls.add(only.job(2), queued)
    calls.close()
    for future in (running, queued):
        with pytest.raises(TransferClosed):
            future.result(0)
