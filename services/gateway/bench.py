"""Throughput of the gateway on one core, in tokens/s: ``python -m services.gateway.bench``.

Three processes run: a synthetic decode worker with a minimal router, the real gateway pinned to one
core, and this process, which runs the clients. In each step, the worker sends one token of every
stream. The first run has no rate limit and measures the maximum throughput. In the second run, the
worker sends ``GOAL`` tokens/s, to measure the gateway's CPU usage at that rate.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import uvicorn
import uvloop
from rich.console import Console
from rich.table import Table
from starlette.types import Receive, Scope, Send

from headrace.v1 import decode_pb2, decode_pb2_grpc, sampling_pb2
from services.common.grpc_server import GrpcServer
from services.common.logging import configure_logging
from services.common.messages import MAX_TOKENS
from services.common.model_source import resolve_model
from services.common.placement import ModelInfo, Placement, WorkerAddress
from services.gateway.service import loop_factory, serve
from services.gateway.settings import GatewaySettings
from services.tokenizer.loading import load_tokenizer

GOAL = 5_000.0
"""Required throughput with 64 clients on one core, tokens/s."""

_TEXT = "The headrace carries water from the reservoir to the turbine, day and night. Öl, 水, 😀!\n"
ADDRESS = "127.0.0.1"


class SyntheticWorker(decode_pb2_grpc.DecodeServicer):
    """Sends one token of every stream per step.

    Args:
        tokens: token ids of the output; a longer output repeats them.
        rate: tokens/s of all streams together; 0 means no limit.
    """

    def __init__(self, tokens: list[int], rate: float) -> None:
        self._tokens = tokens
        self._rate = rate

    async def Session(  # type: ignore[override]  # noqa: N802 - named by the schema
        self, commands: Any, context: Any
    ) -> None:
        # [sent tokens, requested tokens] by stream number.
        streams: dict[int, list[int]] = {}
        wake = asyncio.Event()

        async def read() -> None:
            async for command in commands:
                if command.HasField("start"):
                    streams[command.start.stream] = [0, command.start.request.max_tokens]
                    wake.set()
                elif command.HasField("cancel"):
                    streams.pop(command.cancel.stream, None)

        reading = asyncio.create_task(read())
        due = time.perf_counter()
        try:
            while not reading.done():
                if not streams:
                    wake.clear()
                    await wake.wait()
                    due = time.perf_counter()
                step = self._step(streams)
                await context.write(step)
                if self._rate:
                    due += len(step.deltas) / self._rate
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
        finally:
            reading.cancel()

    def _step(self, streams: dict[int, list[int]]) -> decode_pb2.DecodeStep:
        step = decode_pb2.DecodeStep()
        for number, progress in list(streams.items()):
            delta = step.deltas.add(stream=number)
            sent = progress[0]
            delta.tokens.add(index=sent, token=self._tokens[sent % len(self._tokens)])
            progress[0] = sent + 1
            if progress[0] == progress[1]:
                delta.ended.add(reason=sampling_pb2.FINISH_REASON_LENGTH)
                del streams[number]
        return step


def _router(worker_port: int) -> Callable[[Scope, Receive, Send], Any]:
    address = WorkerAddress(worker_id="w", epoch="e", address=f"{ADDRESS}:{worker_port}")
    model = ModelInfo(
        name="m", context_length=MAX_TOKENS, vocab_size=1 << 24, max_logprobs=0, model_hash=""
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = b""
        more = True
        while more:
            message = await receive()
            call += message.get("body", b"")
            more = message.get("more_body", False)
        body = b"{}"
        if scope["path"] == "/v1/place":
            id = json.loads(call)["placement_id"]
            placed = Placement(
                placement_id=id, prefill=None, decode=address, max_tokens=MAX_TOKENS, model=model
            )
            body = placed.model_dump_json().encode()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def _run_backend(core: int, worker_port: int, router_port: int, rate: float) -> None:
    os.sched_setaffinity(0, {core})
    tokens = load_tokenizer(resolve_model("smollm2-135m")).encode(_TEXT)

    async def main() -> None:
        server = GrpcServer(f"{ADDRESS}:{worker_port}", ())
        worker = SyntheticWorker(tokens, rate)
        decode_pb2_grpc.add_DecodeServicer_to_server(worker, server.server)
        await server.start()
        config = uvicorn.Config(_router(worker_port), port=router_port, log_config=None)
        await uvicorn.Server(config).serve()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _run_gateway(core: int, port: int, grpc_port: int, router_port: int) -> None:
    os.sched_setaffinity(0, {core})
    configure_logging("gateway", level="error")
    settings = GatewaySettings.model_validate(
        {"port": port, "grpc_port": grpc_port, "routers": [f"http://{ADDRESS}:{router_port}"]}
    )
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve(settings))


@dataclass
class Result:
    """Results of one run.

    Attributes:
        pace: rate limit of the synthetic worker, tokens/s; 0 means no limit.
        tokens_per_event: average number of output tokens per server-sent event. It is above 1 if
            some tokens end inside a character, or if the gateway is too slow and sends several
            tokens of a stream in one event.
        cpu: fraction of the core's time that the gateway process used.
    """

    pace: float
    tokens_per_s: float
    requests_per_s: float
    tokens_per_event: float
    cpu: float


class Clients:
    """``count`` clients. Each sends requests for ``length`` output tokens, one after another."""

    def __init__(self, port: int, count: int, length: int) -> None:
        self._port = port
        self._count = count
        body = json.dumps({"prompt": "x", "max_tokens": length, "stream": True}).encode()
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        ) + body
        self._length = length
        self.events = self.responses = 0

    async def run(self, seconds: float) -> None:
        async with asyncio.timeout(seconds + 60):
            deadline = time.perf_counter() + seconds
            await asyncio.gather(*(self._client(deadline) for _ in range(self._count)))

    async def _client(self, deadline: float) -> None:
        reader, writer = await asyncio.open_connection(ADDRESS, self._port)
        while time.perf_counter() < deadline:
            writer.write(self._request)
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                data = await reader.read(1 << 16)
                if not data:
                    raise ConnectionError("the gateway closed a stream")
                self.events += data.count(b'"text":')
                tail = (tail + data)[-5:]
            self.responses += 1
        writer.close()

    @property
    def tokens(self) -> int:
        return self.responses * self._length


def free_port() -> int:
    with socket.create_server((ADDRESS, 0)) as probe:
        return int(probe.getsockname()[1])


async def until_listening(*ports: int) -> None:
    async with asyncio.timeout(60):
        for port in ports:
            while True:
                try:
                    _, writer = await asyncio.open_connection(ADDRESS, port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    break


def measure(rate: float, *, seconds: float, clients: int, length: int) -> Result:
    """Start new processes, warm up, and measure for ``seconds``. ``rate`` limits the worker."""
    cores = sorted(os.sched_getaffinity(0))
    port, grpc_port, worker_port, router_port = (free_port() for _ in range(4))
    context = multiprocessing.get_context("spawn")
    backend = context.Process(
        target=_run_backend, args=(cores[-1], worker_port, router_port, rate), daemon=True
    )
    gateway = context.Process(
        target=_run_gateway, args=(cores[0], port, grpc_port, router_port), daemon=True
    )
    backend.start()
    gateway.start()
    os.sched_setaffinity(0, {cores[-1]})

    async def run() -> Result:
        await until_listening(port, worker_port, router_port)
        await Clients(port, clients, 32).run(0.5)
        process = psutil.Process(gateway.pid)
        before, began = process.cpu_times(), time.perf_counter()
        load = Clients(port, clients, length)
        await load.run(seconds)
        elapsed = time.perf_counter() - began
        after = process.cpu_times()
        cpu = after.user + after.system - before.user - before.system
        return Result(
            pace=rate,
            tokens_per_s=load.tokens / elapsed,
            requests_per_s=load.responses / elapsed,
            tokens_per_event=load.tokens / load.events,
            cpu=cpu / elapsed,
        )

    try:
        return asyncio.run(run())
    finally:
        os.sched_setaffinity(0, set(cores))
        for process in (gateway, backend):
            process.terminate()
            process.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="duration of each of the two runs, seconds"
    )
    parser.add_argument("--clients", type=int, default=64, help="number of concurrent clients")
    parser.add_argument("--length", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    given = parser.parse_args()
    table = Table(title=f"gateway, one core, {given.clients} clients, SSE")
    for column in ("pace", "tokens/s", "goal", "ratio", "requests/s", "tokens/event", "core used"):
        table.add_column(column, justify="right")
    results = []
    for rate in (0.0, GOAL):
        result = measure(rate, seconds=given.seconds, clients=given.clients, length=given.length)
        results.append(asdict(result))
        table.add_row(
            f"{rate:,.0f}/s" if rate else "unpaced",
            f"{result.tokens_per_s:,.0f}",
            f"{GOAL:,.0f}",
            f"{result.tokens_per_s / GOAL:.2f}",
            f"{result.requests_per_s:.1f}",
            f"{result.tokens_per_event:.2f}",
            f"{result.cpu:.0%}",
        )
    Console().print(table)
    if given.json is not None:
        machine = {"machine": platform.platform(), "python": platform.python_version()}
        report = {**machine, "goal_tokens_per_s": GOAL, "runs": results}
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
