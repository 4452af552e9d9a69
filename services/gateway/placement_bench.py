"""Cost of placements: ``python -m services.gateway.placement_bench URL --process PID``.

Places requests at a constant rate through the gateway's client of the router at ``URL``, and
releases each placement. Prints the CPU time per placement of this process and of the router's
process ``PID``, and the latency of placement requests, as JSON. `services.router.bench` starts this
program for a router without other load.

With a URL ``tcp://HOST:PORT``, the same number of bytes is sent to a server that returns what it
receives. Nothing is parsed, so that this cost is the floor.
"""

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from itertools import count
from statistics import quantiles
from typing import Any, cast
from urllib.parse import urlsplit

import psutil
import uvloop

from services.common.logging import configure_logging
from services.common.placement import Outcome, PlaceRequest, Release
from services.common.prefix_hashes import HASH_BYTES
from services.gateway.router_client import RouterClient

WARM_UP_S = 0.5
CALLERS = 8
"""Maximum number of calls in progress."""
HEAD_BYTES = 200
"""Size of the head of a request, as `RouterClient` sends it."""

Place = Callable[[], Coroutine[Any, Any, float]]

_REQUEST = PlaceRequest(request_id="r" * 32, prompt_tokens=1000, max_tokens=128, wait_s=30.0)


@dataclass(frozen=True)
class Cost:
    """Cost of placements.

    Attributes:
        placements_per_s: rate that was reached, per second.
        server_us: CPU time of the server per placement and its release, microseconds.
        client_us: CPU time of the client per placement and its release, microseconds.
        p50_us: median latency of a placement request, microseconds.
        p99_us: 99th percentile of the latency.
    """

    placements_per_s: float
    server_us: float
    client_us: float
    p50_us: float
    p99_us: float


async def measure(place: Place, server: psutil.Process, rate: float, seconds: float) -> Cost:
    """Return the cost of calls of ``place`` at a constant rate.

    Args:
        place: places a request and releases it. It returns the latency in seconds.
        rate: calls per second; 0: as many as possible.
    """
    await _run(place, rate, WARM_UP_S)
    client_s, server_s = time.process_time(), _cpu_s(server)
    latencies = await _run(place, rate, seconds)
    client_s, server_s = time.process_time() - client_s, _cpu_s(server) - server_s
    number = len(latencies)
    cuts = quantiles(latencies, n=100, method="inclusive")
    figures = (server_s / number, client_s / number, cuts[49], cuts[98])
    return Cost(number / seconds, *(figure * 1e6 for figure in figures))


async def _run(place: Place, rate: float, seconds: float) -> list[float]:
    """Call ``place``, and return its results."""
    loop = asyncio.get_running_loop()
    results = list[float]()
    began = loop.time()
    times = (began + (number / rate if rate else 0.0) for number in count())

    async def call() -> None:
        for at in times:
            if max(at, loop.time()) >= began + seconds:
                return
            await asyncio.sleep(max(0.0, at - loop.time()))
            results.append(await place())

    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(call())
    return results


async def measure_router(
    url: str, process: int, rate: float, seconds: float, hashes: int = 0
) -> Cost:
    """Return the cost of placements by a router in another process.

    Args:
        hashes: number of hashes of each prompt. Only the last one differs between prompts.
    """
    blocks = [number.to_bytes(HASH_BYTES, "big") for number in range(hashes)]
    numbers = count(hashes)
    client = RouterClient([url], token=None, timeout_s=5.0)

    async def place() -> float:
        began = time.perf_counter()
        own = [next(numbers).to_bytes(HASH_BYTES, "big")] if hashes else []
        with await client.place(_REQUEST, prefix=blocks[:-1] + own) as routed:
            routed.outcome = Outcome.OK
            return time.perf_counter() - began

    try:
        return await measure(place, psutil.Process(process), rate, seconds)
    finally:
        await client.close()


async def measure_echo(host: str, port: int, process: int, rate: float, seconds: float) -> Cost:
    """Return the cost of placement requests to a server that only returns their bytes."""
    release = Release(placement_id=_REQUEST.placement_id, outcome=Outcome.OK)
    sizes = [HEAD_BYTES + len(each.model_dump_json()) for each in (_REQUEST, release)]
    idle: deque[_EchoClient] = deque()
    loop = asyncio.get_running_loop()

    async def place() -> float:
        began = time.perf_counter()
        client = idle.pop() if idle else (await loop.create_connection(_EchoClient, host, port))[1]
        await client.exchange(sizes[0])
        elapsed = time.perf_counter() - began
        await client.exchange(sizes[1])
        idle.append(client)
        return elapsed

    try:
        return await measure(place, psutil.Process(process), rate, seconds)
    finally:
        for client in idle:
            client.transport.close()


class _EchoClient(asyncio.Protocol):
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    async def exchange(self, size: int) -> None:
        """Send bytes, and wait until as many were returned."""
        self._missing = size
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(bytes(size))
        await self._done

    def data_received(self, data: bytes) -> None:
        self._missing -= len(data)
        if not self._missing:
            self._done.set_result(None)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.gateway.placement_bench")
    parser.add_argument("url", help="of the router, or tcp://HOST:PORT")
    parser.add_argument("--process", type=int, required=True, help="id of the server's process")
    parser.add_argument(
        "--rate", type=float, default=300.0, help="placements per second; 0: as many as possible"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="measured time")
    parser.add_argument(
        "--hashes", type=int, default=0, help="hashes of each prompt that are sent to a router"
    )
    options = parser.parse_args()
    configure_logging("gateway", level="error")
    url = urlsplit(options.url)
    load = options.process, options.rate, options.seconds
    if url.scheme == "tcp":
        run = measure_echo(url.hostname or "", url.port or 0, *load)
    else:
        run = measure_router(options.url, *load, options.hashes)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(run))))


if __name__ == "__main__":
    main()
