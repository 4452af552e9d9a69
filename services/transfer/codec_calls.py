"""Codec calls on the transfer thread, and futures of their results."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Generic, TypeVar

import torch

import codec
from services.transfer.errors import TransferClosed

T = TypeVar("T")

MAX_BATCH = 4
"""Maximum number of segments of a call on a GPU; all of them end together."""


@dataclass(frozen=True)
class Timed(Generic[T]):
    """Result of a codec call, and the seconds that the codec alone took."""

    value: T
    seconds: float


@dataclass(frozen=True)
class CodecJob(Generic[T]):
    """Encode or decode of one segment. Jobs with equal ``paged`` and ``start`` may share a call.

    Attributes:
        paged: codec of the segment's planes.
        start: starts the call for several segments, and returns their results in order.
        segment: `codec.EncodeSegment` or `codec.DecodeSegment`.
        prepare: called on the transfer thread just before the call. It returns False if the result
            is no longer needed; the call is then omitted.
        finish: returns the job's result once the call has ended, or raises.
    """

    paged: codec.PagedCodec
    start: Callable[[codec.PagedCodec, Sequence[Any]], Sequence[codec.Pending[Any]]]
    segment: codec.EncodeSegment | codec.DecodeSegment
    prepare: Callable[[], bool]
    finish: Callable[[Any], T]


_Entry = tuple[CodecJob[Any] | None, Future[Any]]


class CodecCalls:
    """Starts codec calls, polls them and settles their futures. Used on one thread only.

    All calls run on one CUDA stream, so they end in the order in which they were started.

    Args:
        on_gpu: whether calls run on a GPU. Segments then share calls, because a launch costs more
            than a small segment. On a CPU a segment would only wait for the others.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._max_batch = MAX_BATCH if on_gpu else 1
        self._queued: list[_Entry] = []
        self._running: deque[tuple[codec.Pending[Any] | None, _Entry]] = deque()

    def __len__(self) -> int:
        return len(self._queued) + len(self._running)

    def add(self, job: CodecJob[T] | None, future: "Future[Timed[T] | None]") -> None:
        """Queue a job for `start_queued`. Without a job, the future waits for all earlier jobs."""
        self._queued.append((job, future))

    def start_queued(self) -> None:
        """Start the queued jobs."""
        queued, self._queued = self._queued, []
        for _, group in groupby(queued, _kind):
            while batch := list(islice(group, self._max_batch)):
                self._start(batch)

    def poll(self) -> bool:
        """Settle the futures of calls that have ended; return whether there were any."""
        before = len(self._running)
        while self._running and ((call := self._running[0][0]) is None or call.done):
            _, (job, future) = self._running.popleft()
            try:
                ended = None if call is None or job is None else job.finish(call)
                future.set_result(None if call is None else Timed(ended, call.seconds))
            except Exception as error:  # noqa: BLE001 - raised again where the future is read
                future.set_exception(error)
        return len(self._running) < before

    def close(self) -> None:
        """Fail the futures of all calls that have not ended."""
        entries = [*self._queued, *(entry for _, entry in self._running)]
        self._queued.clear()
        self._running.clear()
        for _, future in entries:
            future.set_exception(TransferClosed("the transfer thread has ended"))

    def _start(self, batch: Sequence[_Entry]) -> None:
        """Start one call for jobs of one kind. Jobs without a call are settled in order, too."""
        needed: list[tuple[CodecJob[Any], Future[Any]]] = []
        for job, future in batch:
            try:
                if job is not None and job.prepare():
                    needed.append((job, future))
                else:
                    self._running.append((None, (job, future)))
            except Exception as error:  # noqa: BLE001 - raised again where the future is read
                future.set_exception(error)
        if needed:
            self._call(needed)

    def _call(self, needed: Sequence[tuple[CodecJob[Any], Future[Any]]]) -> None:
        """Start one call, or one for each job if it is refused, so that invalid jobs fail alone."""
        job, future = needed[0]
        try:
            calls = job.start(job.paged, [job.segment for job, _ in needed])
        except Exception as error:  # noqa: BLE001 - raised again where the future is read
            _wait_for_launches()  # part of the call may have been started
            if len(needed) == 1:
                future.set_exception(error)
                return
            for entry in needed:
                self._call([entry])
        else:
            self._running.extend(zip(calls, needed, strict=True))


def _kind(entry: _Entry) -> object:
    job, _ = entry
    return job and (id(job.paged), job.start)


def _wait_for_launches() -> None:
    """Wait for everything on the current CUDA stream, if this process uses CUDA."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


@contextmanager
def codec_stream(device: str) -> Iterator[None]:
    """Make a new CUDA stream current on this thread, if the device is a GPU."""
    with torch.inference_mode():
        if torch.device(device).type != "cuda":
            yield
            return
        # Its kernels are short, and should not wait for all blocks of the engine's kernels.
        stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield
