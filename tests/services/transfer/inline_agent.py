"""An agent for tests of endpoints in one process."""

from concurrent.futures import Future
from typing import TypeVar

from services.transfer.codec_calls import CodecCalls, CodecJob, Timed
from services.transfer.slab import Slab

T = TypeVar("T")


class InlineAgent:
    """Runs codec calls immediately, and has no peers."""

    name = "inline"
    metadata = connection_metadata = b""
    fault: "Future[None]" = Future()

    def register(self, slab: Slab) -> None:
        pass

    def run_codec(self, job: CodecJob[T]) -> "Future[Timed[T] | None]":
        future: Future[Timed[T] | None] = Future()
        calls = CodecCalls(on_gpu=False)
        calls.add(job, future)
        calls.start_queued()
        calls.poll()
        return future

    def notify(self, peer: str, message: bytes) -> None:
        pass
