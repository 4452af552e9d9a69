"""Cost of placements over HTTP on loopback, and its floor; see `services.router.bench`.

A router runs in one process and the gateway's client (`services.gateway.placement_bench`) in
another. The floor is the cost if a TCP server returns the bytes of the same requests.
"""

import asyncio
import json
import multiprocessing
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import httpx
import uvloop

from services.common.interpreter import python_command
from services.common.logging import configure_logging
from services.common.placement import Role
from services.router.service import loop_factory, serve
from services.router.settings import RouterSettings
from services.router.simulated_workers import heartbeat, registration

WORKERS = 5
_HOST = "127.0.0.1"
_START_S = 60.0
"""Maximum time in which a server starts, seconds."""


@dataclass(frozen=True)
class HttpCost:
    """Cost of placements, each with its release, in microseconds.

    Attributes:
        placements_per_s: rate that was reached, per second.
        router_us, client_us: CPU time of the router's and of the client's process per placement.
        p50_us, p99_us: latency of a placement request.
        echo_us, echo_p50_us: CPU time and latency of the floor: of the server that only returns
            bytes.
    """

    placements_per_s: float
    router_us: float
    client_us: float
    p50_us: float
    p99_us: float
    echo_us: float
    echo_p50_us: float


def measure(placements_per_s: float, seconds: float, hashes: int = 0) -> HttpCost:
    """Return the cost at a constant rate of placements, measured for ``seconds`` seconds.

    Args:
        placements_per_s: placements per second; 0: as many as possible.
        hashes: number of hashes of each prompt that the client sends.
    """
    load = ["--rate", f"{placements_per_s}", "--seconds", f"{seconds}", "--hashes", f"{hashes}"]
    with _running(_run_router) as (port, process):
        _join(f"http://{_HOST}:{port}")
        router = _client(f"http://{_HOST}:{port}", process, load)
    with _running(_run_echo) as (port, process):
        echo = _client(f"tcp://{_HOST}:{port}", process, load)
    return HttpCost(
        router["placements_per_s"],
        router["server_us"],
        router["client_us"],
        router["p50_us"],
        router["p99_us"],
        echo["server_us"],
        echo["p50_us"],
    )


def _client(url: str, process: int, load: list[str]) -> dict[str, float]:
    """Run the client, and return what it has measured."""
    program = python_command("-m", "services.gateway.placement_bench")
    command = [*program, url, "--process", f"{process}", *load]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    figures: dict[str, float] = json.loads(output)
    return figures


@contextmanager
def _running(serve: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """Run a server in a new process. Yield its port and the id of the process."""
    with socket.create_server((_HOST, 0)) as probe:
        port = int(probe.getsockname()[1])
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port,))
    process.start()
    try:
        _wait_for(port)
        yield port, process.pid or 0
    finally:
        process.terminate()
        process.join(10)


def _wait_for(port: int) -> None:
    """Wait until a server accepts connections."""
    until = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((_HOST, port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def _join(url: str) -> None:
    """Register idle workers, which send one heartbeat."""
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as http:
        for index in range(WORKERS):
            worker = registration(f"w{index}", Role.PREFILL if index % 2 else Role.DECODE)
            load = heartbeat(f"w{index}", 0, 0, 0, [])
            for path, body in (("register", worker), ("heartbeat", load)):
                http.post(f"/v1/{path}", content=body.model_dump_json()).raise_for_status()


def _run_router(port: int) -> None:
    configure_logging("router", level="error")
    silence = {"suspect_after_s": 600, "gone_after_s": 3600}
    settings = RouterSettings.model_validate({"port": port, **silence})
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve(settings))


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def _serve_echo(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Echo, _HOST, port)
    await server.serve_forever()


def _run_echo(port: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_echo(port))
