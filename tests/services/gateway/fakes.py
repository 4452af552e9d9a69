"""A fake router and fake decode workers on loopback, scripted by tests."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from aiohttp import web
from grpc import aio

from headrace.v1 import decode_pb2, decode_pb2_grpc, error_pb2, sampling_pb2
from services.common.listings import ModelReadiness, ReadinessList, WorkerView
from services.common.messages import MAX_TOKENS
from services.common.placement import ModelInfo, PlaceRequest, Release
from services.common.token_ids import count_tokens

MODEL = {"context_length": 8192, "vocab_size": 1 << 24, "max_logprobs": 100, "model_hash": "m"}
"""The model of workers without a tokenizer: it fits every gateway."""

STOP = sampling_pb2.FINISH_REASON_STOP
LENGTH = sampling_pb2.FINISH_REASON_LENGTH


class FakeStream:
    """The worker's side of a stream, through which a script sends deltas."""

    def __init__(self, worker: "FakeWorker", start: decode_pb2.StartStream, context: Any) -> None:
        self.worker = worker
        self.start = start
        self._context = context
        self.cancelled = asyncio.Event()
        self.cancelled_choices: list[int] = []
        self._sent = [self.replayed] * start.request.choices

    @property
    def replayed(self) -> int:
        """Number of replayed output tokens after the prompt."""
        request = self.start.request
        return count_tokens(request.tokens) - request.prompt_tokens

    async def tokens(
        self,
        *ids: int,
        choice: int = 0,
        logprobs: Sequence[float] = (),
        top: Any = (),
        cached: int | None = None,
    ) -> None:
        """Send one delta with these tokens."""
        delta = decode_pb2.StreamDelta(stream=self.start.stream, cached_tokens=cached)
        for at, id in enumerate(ids):
            delta.tokens.add(
                choice=choice,
                index=self._sent[choice],
                token=id,
                logprob=logprobs[at] if logprobs else 0.0,
                top=top[at] if top else (),
            )
            self._sent[choice] += 1
        await self.send(delta)

    async def end(self, reason: Any = STOP, choice: int = 0, **stages: float) -> None:
        delta = decode_pb2.StreamDelta(stream=self.start.stream)
        delta.ended.add(choice=choice, reason=reason)
        if stages:
            delta.stages.CopyFrom(decode_pb2.StageTimes(**stages))
        await self.send(delta)

    async def fail(self, code: Any, message: str = "scripted failure", worker_id: str = "") -> None:
        error = error_pb2.Error(code=code, message=message, worker_id=worker_id)
        await self.send(decode_pb2.StreamDelta(stream=self.start.stream, error=error))

    async def send(self, delta: decode_pb2.StreamDelta) -> None:
        await self.send_bytes(decode_pb2.DecodeStep(deltas=[delta]).SerializeToString())

    async def send_bytes(self, step: bytes) -> None:
        """Send an encoded step, which may be malformed, unless the gateway has ended the call."""
        async with self.worker.writing:  # a gRPC call allows one write at a time
            with suppress(aio.UsageError):
                await self._context.write(step)


Script = Callable[[FakeStream], Coroutine[Any, Any, None]]


async def hang(stream: FakeStream) -> None:
    """Script: send nothing until cancelled."""
    await stream.cancelled.wait()


def say(*ids: int, end: Any = STOP, pause_s: float = 0.0) -> Script:
    """Return a script that sends the token ids one by one, without those that are replayed."""

    async def script(stream: FakeStream) -> None:
        for id in ids[stream.replayed :]:
            await stream.tokens(id)
            if pause_s:
                await asyncio.sleep(pause_s)
        await stream.end(end)

    return script


class FakeWorker(decode_pb2_grpc.DecodeServicer):
    """Decode worker that runs a script per stream: the next of ``queued``, else ``script``."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.epoch = uuid.uuid4().hex
        self.script: Script = hang
        self.queued: list[Script] = []
        self.streams: list[FakeStream] = []
        self.metadata: list[dict[str, Any]] = []
        self.port = 0
        self._server: aio.Server | None = None
        self.writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> dict[str, str]:
        return {
            "worker_id": self.worker_id,
            "epoch": self.epoch,
            "address": f"127.0.0.1:{self.port}",
        }

    async def start(self) -> None:
        self._server = aio.server()
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        session = grpc.stream_stream_rpc_method_handler(
            self.Session, decode_pb2.DecodeCommand.FromString, _encoded
        )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("headrace.v1.Decode", {"Session": session})]
        )
        await self._server.start()

    async def stop(self) -> None:
        """Abort every call, like a killed process."""
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.stop(0)

    async def Session(  # type: ignore[override]
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Any
    ) -> None:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        by_number: dict[int, FakeStream] = {}
        async for command in commands:
            if command.HasField("start"):
                stream = by_number[command.start.stream] = FakeStream(self, command.start, context)
                self.streams.append(stream)
                script = self.queued.pop(0) if self.queued else self.script
                task = asyncio.create_task(script(stream))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(partial(_forget, by_number, command.start.stream))
            elif command.HasField("cancel_choice"):
                stopped = command.cancel_choice
                by_number[stopped.stream].cancelled_choices.append(stopped.choice)
            elif command.cancel.stream in by_number:
                by_number[command.cancel.stream].cancelled.set()


def _forget(by_number: dict[int, FakeStream], number: int, _: object) -> None:
    del by_number[number]


@dataclass
class FakeRouter:
    """HTTP server that places requests on ``workers`` in order, and records the calls.

    Attributes:
        refusals: status and error code of the next answers to placement requests.
        drops: number of placement requests after which the connection is closed without an answer.
        hold: if True, placement requests block until their client disconnects.
        hung: if True, all other calls block as well, as those of a stopped process.
        not_ready: reason why the model is not ready, if it is not.
        context_length: that of the workers, for readiness.
        outputs: output tokens that fit in the next placements; all, if there are no entries.
        model_info: fields of the model as the workers registered it that differ from `MODEL`, for
            readiness and placements.
        abandoned: number of clients that disconnected from a blocked placement request.
        probes: number of health checks.
        listings: number of calls that list the workers.
        waiting: number of placement requests that a list of workers reports as waiting.
        views: the workers that are listed.
        headers: headers of each placement request, by name in lower case.
        peers: address and port of every client connection that was used.
    """

    workers: list[FakeWorker]
    model: str
    places: list[PlaceRequest] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    refusals: list[tuple[int, str]] = field(default_factory=list)
    drops: int = 0
    hold: bool = False
    hung: bool = False
    not_ready: str | None = None
    context_length: int | None = 8192
    outputs: list[int] = field(default_factory=list)
    model_info: dict[str, Any] = field(default_factory=dict)
    abandoned: int = 0
    probes: int = 0
    listings: int = 0
    waiting: int = 0
    views: list[WorkerView] = field(default_factory=list)
    prefill: str | None = "prefill-0"
    authorizations: set[str | None] = field(default_factory=set)
    headers: list[dict[str, str]] = field(default_factory=list)
    peers: set[Any] = field(default_factory=set)
    placed: set[str] = field(default_factory=set)
    _port: int = 0
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def outstanding(self) -> int:
        return len(self.placed - {release.placement_id for release in self.releases})

    async def started(self, count: int) -> None:
        """Wait until the workers have received ``count`` streams."""
        await until(lambda: sum(len(w.streams) for w in self.workers) >= count)

    async def settled(self) -> None:
        """Wait until every placement was released."""
        await until(lambda: not self.outstanding)

    async def start(self) -> None:
        """Listen on the port of the last start, or on a free port."""
        app = web.Application()
        app.on_response_prepare.append(self._record)
        app.router.add_post("/v1/place", self._place)
        app.router.add_post("/v1/release", self._release)
        app.router.add_get("/v1/readiness", self._readiness)
        app.router.add_get("/v1/workers", self._list_workers)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the listening socket and all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _record(self, http: web.Request, _: web.StreamResponse) -> None:
        self.authorizations.add(http.headers.get("Authorization"))
        if http.transport is not None:
            self.peers.add(http.transport.get_extra_info("peername"))

    async def _place(self, http: web.Request) -> web.Response:
        call = PlaceRequest.model_validate_json(await http.read())
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        await self._block()
        self.places.append(call)
        if self.drops:
            self.drops -= 1
            assert http.transport is not None
            http.transport.abort()
            return web.Response()
        if self.refusals:
            status, code = self.refusals.pop(0)
            return _refuse(status, code)
        free = [w for w in self.workers if w.worker_id not in call.exclude]
        if not free or (self.prefill and self.prefill in call.exclude):
            return _refuse(503, "no_workers")
        self.placed.add(call.placement_id)
        fitting = self.outputs.pop(0) if self.outputs else MAX_TOKENS
        prefill = {"worker_id": self.prefill, "epoch": "e", "address": "127.0.0.1:1"}
        return web.json_response(
            {
                "placement_id": call.placement_id,
                "prefill": prefill if self.prefill else None,
                "decode": free[0].address,
                "max_tokens": min(call.max_tokens, fitting),
                "model": self.info.model_dump(mode="json"),
            }
        )

    async def _release(self, http: web.Request) -> web.Response:
        self.releases.append(Release.model_validate_json(await http.read()))
        return web.json_response({})

    @property
    def info(self) -> ModelInfo:
        """The model as the workers registered it."""
        return ModelInfo.model_validate(MODEL | {"name": self.model} | self.model_info)

    @property
    def readiness(self) -> ModelReadiness:
        """Whether requests can be placed, as the router reports it."""
        return ModelReadiness(
            model=self.model,
            ready=self.not_ready is None,
            reason=self.not_ready,
            infos=[self.info] if self.not_ready is None else [],
            context_length=self.context_length,
        )

    async def _readiness(self, _: web.Request) -> web.Response:
        body = ReadinessList(models=[self.readiness]).model_dump(mode="json")
        return web.json_response(body)

    async def _list_workers(self, _: web.Request) -> web.Response:
        self.listings += 1
        await self._block()
        views = [view.model_dump(mode="json") for view in self.views]
        return web.json_response({"workers": views, "waiting": self.waiting})

    async def _health(self, _: web.Request) -> web.Response:
        self.probes += 1
        while self.hung:  # noqa: ASYNC110 - a flag is simplest for tests
            await asyncio.sleep(0.005)
        return web.json_response({})

    async def _block(self) -> None:
        try:
            while self.hold or self.hung:  # noqa: ASYNC110 - a flag is simplest for tests
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.abandoned += 1
            raise


async def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Poll until a condition holds; raise TimeoutError after ``limit_s`` seconds."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.005)


def _encoded(step: decode_pb2.DecodeStep | bytes) -> bytes:
    return step if isinstance(step, bytes) else step.SerializeToString()


def _refuse(status: int, code: str) -> web.Response:
    body = {"error": {"code": code, "message": f"refused: {code}"}}
    return web.json_response(body, status=status, headers={"Retry-After": "3"})


@asynccontextmanager
async def running(*servers: FakeWorker | FakeRouter) -> AsyncIterator[None]:
    """Start the servers, and stop them at the end."""
    for server in servers:
        await server.start()
    try:
        yield
    finally:
        for server in servers:
            await server.stop()
