"""Texts/s of a gateway for embeddings: ``python -m services.gateway.encoding_bench``.

A synthetic encoder worker answers at once, with zeros, so that the gateway is the limit. The real
gateway has the first ``--cores`` cores. The worker, a minimal router and the clients have the
others, or the last one if there are no others. Each client sends lists of texts, one after another.
Meanwhile, another client sends a small request every 50 ms. Its latency shows how long tokenization
delays other work of the gateway, such as streams of tokens.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics
from statistics import quantiles
from typing import Any

import psutil
import uvicorn
import uvloop
from grpc import aio
from rich.console import Console
from rich.table import Table
from starlette.types import Receive, Scope, Send

from headrace.v1 import encode_pb2, encode_pb2_grpc
from services.common.encoder_placement import (
    EncodePlacement,
    EncoderList,
    EncoderModel,
    EncoderReadiness,
    EncoderTask,
)
from services.common.grpc_server import GrpcServer
from services.common.logging import configure_logging
from services.common.placement import WorkerAddress
from services.gateway.bench import ADDRESS, free_port, until_listening
from services.gateway.encoding.models import ServedEncoder
from services.gateway.service import loop_factory, serve
from services.gateway.settings import NO_MODEL, GatewaySettings

_DIMENSION = 384
_LISTS = 64
"""Number of different lists of texts."""
_WARM_UP_S = 1.0
_PROBE_S = 0.05
"""Time between two small requests, seconds."""


class SyntheticEncoder(encode_pb2_grpc.EncoderServicer):
    """Returns zeros for each input, at once."""

    async def Encode(  # noqa: N802 - named by the schema
        self,
        request: encode_pb2.EncodeRequest,
        context: "aio.ServicerContext[Any, Any]",  # noqa: ARG002
    ) -> encode_pb2.EncodeReply:
        return encode_pb2.EncodeReply(outputs=[bytes(4 * _DIMENSION)] * len(request.inputs))


def _router(encoder: ServedEncoder, worker_port: int) -> Callable[[Scope, Receive, Send], Any]:
    model = EncoderModel(
        name=encoder.name,
        task=EncoderTask.EMBED,
        dimension=_DIMENSION,
        max_tokens=512,
        vocab_size=encoder.identity.vocab_size,
        model_hash="m",
        tokenizer_hash=encoder.identity.hash,
    )
    ready = EncoderReadiness(model=model.name, ready=True, infos=[model])
    listed = EncoderList(workers=[], models=[ready])
    worker = WorkerAddress(worker_id="w", epoch="e", address=f"{ADDRESS}:{worker_port}")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call, more, body = b"", True, b"{}"
        while more:
            message = await receive()
            call += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] == "/v1/encoders":
            body = listed.model_dump_json().encode()
        elif scope["path"] == "/v1/encoders/place":
            id = json.loads(call)["placement_id"]
            placed = EncodePlacement(placement_id=id, worker=worker, model=model)
            body = placed.model_dump_json().encode()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def _run_backend(cores: set[int], model: str, worker_port: int, router_port: int) -> None:
    os.sched_setaffinity(0, cores)
    router = _router(ServedEncoder.load(model, None), worker_port)

    async def main() -> None:
        server = GrpcServer(f"{ADDRESS}:{worker_port}", ())
        encode_pb2_grpc.add_EncoderServicer_to_server(SyntheticEncoder(), server.server)
        await server.start()
        config = uvicorn.Config(router, port=router_port, log_config=None)
        await uvicorn.Server(config).serve()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _run_gateway(cores: set[int], model: str, port: int, router_port: int) -> None:
    os.sched_setaffinity(0, cores)
    configure_logging("gateway", level="error")
    settings = GatewaySettings.model_validate(
        {
            "port": port,
            "grpc_port": free_port(),
            "routers": [f"http://{ADDRESS}:{router_port}"],
            "model": NO_MODEL,
            "encoder_model": model,
        }
    )
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve(settings))


@dataclass(frozen=True)
class Result:
    """Results of one run.

    Attributes:
        cpu_ms: CPU time of the gateway for one list of texts.
        probe_ms: latency of small requests: median, 99th percentile and maximum.
    """

    texts_per_s: float
    cpu_ms: float
    probe_ms: tuple[float, float, float]


class Clients:
    """Clients of one gateway.

    Args:
        lists: lists of texts, which the clients send in turn.
    """

    def __init__(self, port: int, lists: list[list[str]]) -> None:
        self._port = port
        self._requests = [
            _request("POST", "/v1/embeddings", json.dumps(body).encode())
            for body in ({"input": texts, "encoding_format": "base64"} for texts in lists)
        ]

    async def run(self, count: int, seconds: float) -> tuple[int, list[float]]:
        """Return the number of answers, and the latencies of small requests in ms."""
        until = time.perf_counter() + seconds
        async with asyncio.timeout(seconds + 60), asyncio.TaskGroup() as group:
            probe = group.create_task(self._probe(until))
            lists = [group.create_task(self._send_lists(index, until)) for index in range(count)]
        return sum(task.result() for task in lists), probe.result()

    async def until_ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self._call(_request("GET", "/ready"))
                except ConnectionError:
                    await asyncio.sleep(0.1)

    async def _send_lists(self, index: int, until: float) -> int:
        reader, writer = await asyncio.open_connection(ADDRESS, self._port)
        answers = 0
        while time.perf_counter() < until:
            await _exchange(reader, writer, self._requests[(index + answers) % _LISTS])
            answers += 1
        writer.close()
        return answers

    async def _probe(self, until: float) -> list[float]:
        reader, writer = await asyncio.open_connection(ADDRESS, self._port)
        latencies = []
        while (began := time.perf_counter()) < until:
            await _exchange(reader, writer, _request("GET", "/health"))
            latencies.append(1e3 * (time.perf_counter() - began))
            await asyncio.sleep(_PROBE_S)
        writer.close()
        return latencies

    async def _call(self, request: bytes) -> None:
        reader, writer = await asyncio.open_connection(ADDRESS, self._port)
        try:
            await _exchange(reader, writer, request)
        finally:
            writer.close()


def _request(method: str, path: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    """Send a request and read the answer.

    Raises:
        ConnectionError: the answer has another status than 200.
    """
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    body = await reader.readexactly(int(length))
    if not head.startswith(b"http/1.1 200"):
        raise ConnectionError(f"{head!r} {body[:300]!r}")


def lists_of(encoder: ServedEncoder, count: int, tokens: int) -> list[list[str]]:
    """Return lists of ``count`` texts of ``tokens`` tokens from Python's documentation."""
    tokenizer = encoder.tokenizer
    ids = tokenizer.encode("\n\n".join(text for _, text in sorted(topics.items()))).tokens
    length = tokens - 2  # [CLS] and [SEP]
    last = len(ids) - length
    starts = (1 + index * length % last for index in range(_LISTS * count))
    texts = [tokenizer.plain.decode(ids[start : start + length]) for start in starts]
    return [texts[at : at + count] for at in range(0, len(texts), count)]


def measure(
    model: str, lists: list[list[str]], *, cores: int, clients: int, seconds: float
) -> Result:
    """Start new processes, warm up, and measure for ``seconds``."""
    known = sorted(os.sched_getaffinity(0))
    own, others = set(known[:cores]), set(known[cores:] or known[-1:])
    port, worker_port, router_port = (free_port() for _ in range(3))
    context = multiprocessing.get_context("spawn")
    backend = context.Process(
        target=_run_backend, args=(others, model, worker_port, router_port), daemon=True
    )
    gateway = context.Process(
        target=_run_gateway, args=(own, model, port, router_port), daemon=True
    )
    backend.start()
    gateway.start()
    os.sched_setaffinity(0, others)

    async def run() -> Result:
        await until_listening(port, worker_port, router_port)
        load = Clients(port, lists)
        await load.until_ready()
        await load.run(clients, _WARM_UP_S)
        process = psutil.Process(gateway.pid)
        before, began = process.cpu_times(), time.perf_counter()
        answers, latencies = await load.run(clients, seconds)
        elapsed = time.perf_counter() - began
        after = process.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        cuts = quantiles(latencies, n=100, method="inclusive")
        return Result(
            texts_per_s=answers * len(lists[0]) / elapsed,
            cpu_ms=1e3 * cpu_s / answers,
            probe_ms=(cuts[49], cuts[98], max(latencies)),
        )

    try:
        return asyncio.run(run())
    finally:
        os.sched_setaffinity(0, set(known))
        for process in (gateway, backend):
            process.terminate()
            process.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.gateway.encoding_bench")
    parser.add_argument("--model", default="all-minilm-l6-v2", help="encoder with the tokenizer")
    parser.add_argument("--cores", default="1,2", help="numbers of cores of the gateway")
    parser.add_argument("--clients", default="1,4,16", help="numbers of clients")
    parser.add_argument("--texts", type=int, default=32, help="texts of a list")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a text")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured time of each run")
    given = parser.parse_args()
    lists = lists_of(ServedEncoder.load(given.model, None), given.texts, given.tokens)
    table = Table(title=f"gateway, lists of {given.texts} texts of {given.tokens} tokens")
    latencies = [f"small request, {part}, ms" for part in ("p50", "p99", "max")]
    for column in ("cores", "clients", "texts/s", "CPU, ms/list", *latencies):
        table.add_column(column, justify="right")
    for cores in map(int, given.cores.split(",")):
        for clients in map(int, given.clients.split(",")):
            result = measure(
                given.model, lists, cores=cores, clients=clients, seconds=given.seconds
            )
            table.add_row(
                str(cores),
                str(clients),
                f"{result.texts_per_s:,.0f}",
                f"{result.cpu_ms:.2f}",
                *(f"{latency:.1f}" for latency in result.probe_ms),
            )
    Console().print(table)


if __name__ == "__main__":
    main()
