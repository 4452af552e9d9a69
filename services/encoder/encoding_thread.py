"""The encoding thread, the only thread that uses the encoder and its device."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import torch
from torch import Tensor

from headrace.v1 import error_pb2
from runtime.encoder.model import EncoderInput
from runtime.errors import InvalidRequest
from services.common.rate import Rate
from services.encoder.batches import BatchQueue, Item
from services.worker.stall import Stall

log = structlog.get_logger()

_RATE_MEMORY_S = 5.0
"""Time constant of the rate of computed tokens, over batches, in seconds."""
_RATE_KNOWN_AFTER_S = 0.01
STOP_S = 10.0
"""Maximum time to wait for the current batch at shutdown, in seconds."""
MAX_TIMES = 1 << 14
"""Batches whose durations are kept until they are read; older ones are dropped."""


class Encodes(Protocol):
    """The part of `runtime.encoder.model.Encoder` that the thread uses."""

    @property
    def device(self) -> torch.device: ...
    def check(self, each: EncoderInput) -> None: ...
    def encode(self, inputs: Sequence[EncoderInput]) -> Tensor: ...


class EncodeFailure(Exception):
    """A call has no result.

    Attributes:
        code: error code for the gateway.
    """

    def __init__(self, code: "error_pb2.ErrorCode.ValueType", message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class EncodingLoad:
    """Load of the thread.

    Attributes:
        calls: number of calls submitted since the start; all of them are included.
        queue_tokens: tokens accepted and not computed yet.
        running: inputs in the current batch.
        waiting: inputs that wait for a batch.
        tokens_per_s: tokens computed per second in recent batches; 0 if there were none.
        batches: batches since the start.
        inputs, tokens: inputs and tokens computed since the start.
        busy_s: total time of the batches in seconds.
    """

    calls: int
    queue_tokens: int
    running: int
    waiting: int
    tokens_per_s: float
    batches: int
    inputs: int
    tokens: int
    busy_s: float


@dataclass(frozen=True)
class Encoded:
    """Result of a call: little-endian float32 for each input, and the mean times of its inputs."""

    outputs: list[bytes]
    queue_s: float
    compute_s: float


@dataclass(eq=False)
class EncodeCall:
    """Inputs that were submitted together. ``result`` is set on the event loop."""

    inputs: Sequence[EncoderInput]
    result: "asyncio.Future[Encoded]"
    submitted: float
    items: "list[Item[EncodeCall]]" = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)
    left: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0


class EncodingThread:
    """Computes the inputs of all calls in batches.

    Calls are submitted and cancelled on the event loop. The queue is shared with the thread, under
    a lock that is held for bookkeeping only.

    Args:
        max_queue_tokens: tokens above which a call is refused, unless the queue is empty.
        on_fault: called on the event loop with an exception of the encoder. The process is expected
            to end, because the state of the device is unknown.

    Attributes:
        batch_times: duration of each batch in seconds; a reader removes them.
        queue_times: mean time of the inputs of each call before their batch, in seconds; likewise.
        not_finite: number of inputs whose output was NaN or infinite.
    """

    def __init__(
        self,
        encoder: Encodes,
        *,
        batch_tokens: int,
        max_queue_tokens: int,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._encoder = encoder
        self._max_queue_tokens = max_queue_tokens
        self._on_fault = on_fault
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._queue: BatchQueue[EncodeCall] = BatchQueue(batch_tokens)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="encoder", daemon=True)
        self._stall = Stall(
            lambda: f"self/task/{self._thread.native_id}",
            by_processor=encoder.device.type == "cpu",
        )
        self._rate = Rate(_RATE_MEMORY_S, _RATE_KNOWN_AFTER_S)
        self._batch_since = math.inf
        self._running = self._running_tokens = 0
        self._batches = self._inputs = self._tokens = 0
        self._busy_s = 0.0
        self.submitted = 0
        self.not_finite = 0
        self.batch_times: deque[float] = deque(maxlen=MAX_TIMES)
        self.queue_times: deque[float] = deque(maxlen=MAX_TIMES)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def load(self) -> EncodingLoad:
        """The current load."""
        with self._changed:
            return EncodingLoad(
                calls=self.submitted,
                queue_tokens=self._queue.tokens + self._running_tokens,
                running=self._running,
                waiting=self._queue.waiting,
                tokens_per_s=self._rate.per_s or 0.0,
                batches=self._batches,
                inputs=self._inputs,
                tokens=self._tokens,
                busy_s=self._busy_s,
            )

    @property
    def stalled_s(self) -> float:
        """Seconds since the thread made progress in the current batch; 0 without one."""
        return self._stall.seconds(max(0.0, time.perf_counter() - self._batch_since))

    def submit(self, inputs: Sequence[EncoderInput]) -> EncodeCall:
        """Queue inputs, at least one, for the next batches.

        Raises:
            EncodeFailure: an input is invalid (INVALID), or too many tokens are queued
                (OVERLOADED).
        """
        try:
            for each in inputs:
                self._encoder.check(each)
        except InvalidRequest as error:
            raise EncodeFailure(error_pb2.ERROR_CODE_INVALID, str(error)) from None
        lengths = [len(each.tokens) for each in inputs]
        call = EncodeCall(inputs, self._loop.create_future(), time.perf_counter())
        call.outputs, call.left = [b""] * len(inputs), len(inputs)
        with self._changed:
            queued = self._queue.tokens + self._running_tokens
            if queued and queued + sum(lengths) > self._max_queue_tokens:
                raise EncodeFailure(
                    error_pb2.ERROR_CODE_OVERLOADED,
                    f"{queued} tokens are queued on this worker, the limit is "
                    f"{self._max_queue_tokens}",
                )
            call.items = self._queue.add(call, lengths)
            self.submitted += 1
            self._changed.notify()
        return call

    def cancel(self, call: EncodeCall) -> None:
        """Remove the inputs of a call that are not in a batch yet. Idempotent."""
        with self._changed:
            self._queue.drop(call.items)
        call.result.cancel()

    def fail(self, call: EncodeCall, failure: EncodeFailure) -> None:
        """End a call with an error. Called on the event loop."""
        with self._changed:
            self._queue.drop(call.items)
        if not call.result.done():
            call.result.set_exception(failure)

    async def stop(self) -> None:
        """End the thread after its current batch; a thread that hangs is abandoned."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_S)
        if self._thread.is_alive():
            log.error("encoding thread did not end", waited_s=STOP_S)

    def _run(self) -> None:
        try:
            while batch := self._next():
                self._compute(batch)
        except BaseException as error:  # noqa: BLE001 - reported: the process ends on it
            self._post(self._on_fault, error)

    def _next(self) -> "list[Item[EncodeCall]]":
        """Return the next batch; wait for one. Empty at the end of the thread."""
        with self._changed:
            while not self._stopping and not self._queue.waiting:
                self._changed.wait()
            if self._stopping:
                return []
            batch = self._queue.take()
            self._running = len(batch)
            self._running_tokens = sum(item.tokens for item in batch)
            return batch

    def _compute(self, batch: "list[Item[EncodeCall]]") -> None:
        began = self._batch_since = time.perf_counter()
        found = _encode(self._encoder, [item.call.inputs[item.index] for item in batch])
        duration_s = time.perf_counter() - began
        self._batch_since = math.inf
        with self._changed:
            tokens, self._running, self._running_tokens = self._running_tokens, 0, 0
            self._batches += 1
            self._inputs += len(batch)
            self._tokens += tokens
            self._busy_s += duration_s
            self._rate.add(tokens, duration_s)
        self.batch_times.append(duration_s)
        self._post(self._deliver, batch, found, began, duration_s)

    def _deliver(
        self,
        batch: "list[Item[EncodeCall]]",
        found: "Sequence[bytes | EncodeFailure]",
        began: float,
        duration_s: float,
    ) -> None:
        """Pass the outputs of a batch to their calls; called on the event loop."""
        for item, output in zip(batch, found, strict=True):
            call = item.call
            if isinstance(output, EncodeFailure):
                self.not_finite += output.code == error_pb2.ERROR_CODE_NOT_FINITE
                self.fail(call, output)
                continue
            call.outputs[item.index] = output
            call.queue_s += began - call.submitted
            call.compute_s += duration_s
            call.left -= 1
            if not call.left and not call.result.done():
                count = len(call.inputs)
                encoded = Encoded(call.outputs, call.queue_s / count, call.compute_s / count)
                self.queue_times.append(encoded.queue_s)
                call.result.set_result(encoded)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed because the process is ending
            self._loop.call_soon_threadsafe(callback, *arguments)


def _encode(encoder: Encodes, inputs: Sequence[EncoderInput]) -> "list[bytes | EncodeFailure]":
    """Return the output of each input, or why it has none."""
    rows = encoder.encode(inputs).to("cpu", torch.float32).contiguous()
    sound = torch.isfinite(rows).all(dim=1).tolist()
    return [
        row.tobytes() if finite else EncodeFailure(error_pb2.ERROR_CODE_NOT_FINITE, _NOT_FINITE)
        for row, finite in zip(rows.numpy().astype("<f4", copy=False), sound, strict=True)
    ]


_NOT_FINITE = "the output of the model for an input is NaN or infinite"
