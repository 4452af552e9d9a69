"""The encoder worker: embeddings of texts and scores of pairs, in batches formed by tokens."""

import asyncio
import re
from typing import Any

import structlog
import uvloop
from grpc import aio

from headrace.v1 import encode_pb2, encode_pb2_grpc, error_pb2
from runtime.encoder.model import EncoderInput
from runtime.errors import InvalidRequest
from services.common.encoder_placement import ENCODER, EncoderRegistration
from services.common.grpc_server import GrpcServer
from services.common.messages import PLACEMENT_ID
from services.common.metrics_server import serving_start
from services.common.token_ids import unpack_tokens
from services.common.tracing import MAX_TEXT_CHARS, Attributes, Span, message_headers, resume
from services.encoder.encoding_thread import EncodeCall, EncodeFailure, EncodingThread
from services.encoder.loading import LoadedEncoder, load_worker, self_test_input
from services.encoder.metrics import EncoderMetrics
from services.encoder.registration import EncoderRegistrar
from services.encoder.settings import EncoderSettings
from services.worker.process import WorkerProcess, run_process
from services.worker.threads import in_thread
from services.worker.wire import deadline_from_message

log = structlog.get_logger()

loop_factory = uvloop.new_event_loop

SERVICE = "headrace.v1.Encoder"
_NOT_FINITE = "the output for a test input is NaN or infinite"


class EncoderWorker(WorkerProcess):
    """An encoder worker: the encoding thread, and the calls of gateways.

    Attributes:
        thread: computes the inputs.
        registrar: reports admitted placements; None until the worker registers.
    """

    parts = "the encoder"

    def __init__(self, loaded: LoadedEncoder) -> None:
        self.worker_id, self.epoch = loaded.worker_id, loaded.epoch
        self.loaded = loaded
        self._metrics = EncoderMetrics()
        encoder, model = loaded.encoder, loaded.model
        self._metrics.info.labels(
            self.worker_id, model.name, model.task.value, encoder.backend
        ).set(1)
        self.fault = asyncio.get_running_loop().create_future()
        self.thread = EncodingThread(
            encoder,
            batch_tokens=loaded.batch_tokens,
            max_queue_tokens=loaded.max_queue_tokens,
            on_fault=self._fail,
        )
        self.registrar: EncoderRegistrar | None = None
        self._calls: set[EncodeCall] = set()
        self._unsound: str | None = None
        self._tested = 0
        self._testing: asyncio.Task[None] | None = None

    @property
    def metrics(self) -> EncoderMetrics:
        """Metrics of the process."""
        return self._metrics

    @property
    def idle(self) -> bool:
        """Whether no call is in progress."""
        return not self._calls

    @property
    def not_ready(self) -> str | None:
        """Reason to send this worker no more requests, or None."""
        return self._unsound

    def stalled(self, limit_s: float) -> str | None:
        """Return that the thread has made no progress for longer than ``limit_s``, or None."""
        if (stalled_s := self.thread.stalled_s) <= limit_s:
            return None
        return f"the encoding thread has made no progress in its batch for {stalled_s:.0f} s"

    def start(self, address: str, settings: EncoderSettings) -> EncoderRegistrar:
        """Start the thread, and return what registers the worker under its gRPC address."""
        loaded = self.loaded
        registration = EncoderRegistration(
            worker_id=self.worker_id,
            epoch=self.epoch,
            address=address,
            model=loaded.model,
            max_queue_tokens=loaded.max_queue_tokens,
            batch_tokens=loaded.batch_tokens,
            heartbeat_s=settings.heartbeat_s,
        )
        self.registrar = EncoderRegistrar(
            registration, self.thread, settings.routers, token=settings.token, tls=settings.tls
        )
        self.thread.start()
        return self.registrar

    async def encode(self, request: encode_pb2.EncodeRequest) -> encode_pb2.EncodeReply:
        """Return the outputs of a request's inputs.

        Raises:
            EncodeFailure: it has no result.
        """
        if request.epoch != self.epoch:
            raise EncodeFailure(error_pb2.ERROR_CODE_INCOMPATIBLE, "this worker has restarted")
        if self.draining:
            raise EncodeFailure(error_pb2.ERROR_CODE_DRAINING, "this worker is draining")
        try:
            inputs = _inputs(request)
            deadline_s = deadline_from_message(request.deadline_s)
        except (InvalidRequest, ValueError) as error:
            raise EncodeFailure(error_pb2.ERROR_CODE_INVALID, str(error)) from None
        call = self.thread.submit(inputs)
        self._calls.add(call)
        if self.registrar is not None:
            self.registrar.admit(request.placement_id)
        try:
            async with asyncio.timeout(deadline_s):
                encoded = await call.result
        except TimeoutError:
            raise EncodeFailure(
                error_pb2.ERROR_CODE_DEADLINE, "the request's deadline passed"
            ) from None
        finally:
            self.thread.cancel(call)
            self._calls.discard(call)
            if self.registrar is not None:
                self.registrar.end(request.placement_id)
        return encode_pb2.EncodeReply(
            outputs=encoded.outputs,
            tokens=sum(len(each.tokens) for each in inputs),
            queue_s=encoded.queue_s,
            compute_s=encoded.compute_s,
        )

    def end_requests(self) -> None:
        """End every call with DRAINING."""
        failure = EncodeFailure(error_pb2.ERROR_CODE_DRAINING, "this worker is shutting down")
        for call in tuple(self._calls):
            self.thread.fail(call, failure)

    def observe(self) -> None:
        """Set the gauges. If outputs were not finite, test whether the worker is sound."""
        self._metrics.observe(self.thread)
        is_due = self._unsound or self.thread.not_finite != self._tested
        if is_due and (self._testing is None or self._testing.done()):
            self._testing = asyncio.create_task(self._test())

    async def close(self) -> None:
        """Stop the thread."""
        if self._testing is not None:
            self._testing.cancel()
        await self.thread.stop()

    async def _test(self) -> None:
        """Compute a fixed input, whose output is finite on a sound worker.

        If the input is refused, for example because the queue is full, `observe` tests again.
        """
        model = self.loaded.model
        try:
            call = self.thread.submit([self_test_input(model.max_tokens, model.vocab_size)])
            await call.result
        except EncodeFailure as failure:
            if failure.code != error_pb2.ERROR_CODE_NOT_FINITE:
                return
            self._unsound = _NOT_FINITE
            log.error("self-test failed", reason=str(failure))
        else:
            self._unsound = None
        self._tested = self.thread.not_finite

    def _fail(self, error: BaseException) -> None:
        if not self.fault.done():
            self.fault.set_exception(error)


class EncoderServicer(encode_pb2_grpc.EncoderServicer):
    """Serves ``headrace.v1.Encoder``."""

    def __init__(self, worker: EncoderWorker) -> None:
        self._worker = worker

    async def Encode(  # noqa: N802 - named by the schema
        self,
        request: encode_pb2.EncodeRequest,
        context: "aio.ServicerContext[Any, Any]",  # noqa: ARG002
    ) -> encode_pb2.EncodeReply:
        """Return the outputs of the inputs, or the error that the gateway handles."""
        worker = self._worker
        result = "ok"
        span = _span(request)
        try:
            return await worker.encode(request)
        except EncodeFailure as failure:
            result = error_pb2.ErrorCode.Name(failure.code).removeprefix("ERROR_CODE_").lower()
            span.fail(result, str(failure))
            return encode_pb2.EncodeReply(
                error=error_pb2.Error(
                    code=failure.code, message=str(failure), worker_id=worker.worker_id
                )
            )
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            worker.metrics.calls.labels(result).inc()
            span.end()


def _inputs(request: encode_pb2.EncodeRequest) -> list[EncoderInput]:
    """Return the inputs of a request.

    Raises:
        InvalidRequest, ValueError: there is none, or one or the placement's id is malformed.
    """
    if not request.inputs:
        raise InvalidRequest("there are no inputs")
    if not re.fullmatch(PLACEMENT_ID, request.placement_id):
        raise InvalidRequest(f"placement_id {request.placement_id[:80]!r} is malformed")
    return [EncoderInput(unpack_tokens(each.tokens), tuple(each.types)) for each in request.inputs]


def _span(request: encode_pb2.EncodeRequest) -> Span:
    attributes: Attributes = {
        "headrace.request.id": request.request_id[:MAX_TEXT_CHARS],
        "headrace.attempt": request.attempt,
        "headrace.inputs": len(request.inputs),
    }
    return resume("encode", message_headers(request.trace), attributes)


async def serve(settings: EncoderSettings) -> None:
    """Run one encoder worker until SIGTERM or SIGINT, then drain.

    Raises:
        SettingsError: the worker cannot start with these settings.
    """
    tls = settings.tls  # invalid files are reported before the model is loaded
    with serving_start(settings, lambda: "the model is loaded"):
        loaded = await in_thread(lambda: load_worker(settings))
    worker = EncoderWorker(loaded)
    server = GrpcServer(settings.endpoint, [SERVICE], token_check=settings.token_check, tls=tls)
    encode_pb2_grpc.add_EncoderServicer_to_server(EncoderServicer(worker), server.server)
    await run_process(
        worker, server, settings, ENCODER, lambda address: worker.start(address, settings)
    )
