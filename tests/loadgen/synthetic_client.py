"""Raw HTTP and gRPC clients of the synthetic server."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc import aio

from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc
from tests.loadgen.synthetic import Behaviour, SyntheticServer, Truth

EARLY_S = 1e-6
"""Maximum seconds by which a timer may fire early."""
NO_ANSWER_S = 2.0
"""Seconds after which a connection counts as unanswered."""
WORDS = " w0 w1 w2 w3 w4"


def lateness(truths: list[Truth], behaviour: Behaviour) -> list[float]:
    """Return the lateness of each event in seconds, computed independently of the server."""
    return [
        at - (truth.started or 0.0) - behaviour.ttft_s - i * behaviour.itl_s
        for truth in truths
        for i, at in enumerate(truth.written)
    ]


def raw_request(**body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


def exchange(url: str, *, wait_s: float = 10.0, **body: Any) -> tuple[bytes, str]:
    """Return all bytes of an answer, and how the connection ended: "fin", "rst" or "open".

    "open" means that it was still open ``wait_s`` seconds after the request.
    """
    address = urlsplit(url)
    received = b""
    with socket.create_connection((address.hostname, address.port), wait_s) as connection:
        connection.sendall(raw_request(**body))
        try:
            while data := connection.recv(65536):
                received += data
        except ConnectionResetError:
            return received, "rst"
        except TimeoutError:
            return received, "open"
        return received, "fin"


async def exchange_async(server: SyntheticServer, **body: Any) -> bytes:
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(raw_request(**body))
    answer = await reader.read()
    writer.close()
    return answer


async def generate(
    server: SyntheticServer, wait_s: float = 10.0, **request: Any
) -> AsyncIterator[pb.GenerateResponse | grpc.StatusCode]:
    """Yield the responses of a gRPC call, and then its status."""
    async with aio.insecure_channel(server.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(**request), timeout=wait_s)
        try:
            async for response in call:
                yield response
        except aio.AioRpcError as error:
            yield error.code()
        else:
            yield grpc.StatusCode.OK
