"""Latency of placement requests over HTTP on loopback: ``python -m services.router.http_bench``.

A router with one colocated worker runs in its own process. This process sends placement requests
with an aiohttp client like that of the gateway, one at a time, and releases each placement. It
waits 0 or 20 ms before each call. ``GET /health``, whose handler does nothing, shows the cost of
HTTP alone.
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import socket
import time
from pathlib import Path
from statistics import quantiles

import aiohttp
import uvloop

from services.common.logging import configure_logging
from services.common.placement import Outcome, Placement, PlaceRequest, Release, Role
from services.router.service import loop_factory, serve
from services.router.settings import RouterSettings
from services.router.simulated_workers import heartbeat, registration

PAUSES_S = (0.0, 0.02)
WARM_UP = 100  # calls that are not measured
_REQUEST = PlaceRequest(request_id="r" * 32, prompt_tokens=1000, max_tokens=128, wait_s=30.0)


def _run_router(port: int) -> None:
    configure_logging("router", level="error")
    silence = {"suspect_after_s": 600, "gone_after_s": 3600}  # the worker sends one heartbeat
    settings = RouterSettings.model_validate({"port": port, **silence})
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve(settings))


async def _post(http: aiohttp.ClientSession, path: str, body: str) -> bytes:
    async with http.post(path, data=body.encode()) as response:
        response.raise_for_status()
        return await response.read()


async def _health_s(http: aiohttp.ClientSession) -> float:
    began = time.perf_counter()
    async with http.get("/health") as response:
        await response.read()
    return time.perf_counter() - began


async def _place_s(http: aiohttp.ClientSession) -> float:
    began = time.perf_counter()
    answer = await _post(http, "/v1/place", _REQUEST.model_dump_json())
    placement = Placement.model_validate_json(answer)
    elapsed = time.perf_counter() - began
    release = Release(placement_id=placement.placement_id, outcome=Outcome.OK)
    await _post(http, "/v1/release", release.model_dump_json())
    return elapsed


async def measure(port: int, calls: int) -> dict[str, list[float]]:
    """Return the latencies of ``calls`` calls of each kind and pause, in seconds."""
    latencies: dict[str, list[float]] = {}
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as http:
        await _until_ready(http)
        worker, load = registration("w", Role.COLOCATED), heartbeat("w", 0, 0, 0, [])
        await _post(http, "/v1/register", worker.model_dump_json())
        await _post(http, "/v1/heartbeat", load.model_dump_json())
        for pause_s in PAUSES_S:
            for name, call in (("health", _health_s), ("place", _place_s)):
                taken = []
                for _ in range(WARM_UP + calls):
                    await asyncio.sleep(pause_s)
                    taken.append(await call(http))
                latencies[f"{name}, pause {pause_s * 1e3:.0f} ms"] = taken[WARM_UP:]
    return latencies


async def _until_ready(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await _health_s(http)
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.05)
            else:
                return


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.router.http_bench")
    parser.add_argument("--calls", type=int, default=1000, help="number of calls of each kind")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    router = multiprocessing.get_context("spawn").Process(target=_run_router, args=(port,))
    router.start()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            latencies = runner.run(measure(port, options.calls))
    finally:
        router.terminate()
        router.join(10)
    figures = {}
    for name, taken in latencies.items():
        cuts = [cut * 1e6 for cut in quantiles(taken, n=100, method="inclusive")]
        figures[name] = {"p50_us": cuts[49], "p99_us": cuts[98]}
        print(f"{name:<22}p50 {cuts[49]:>6.0f} µs   p99 {cuts[98]:>6.0f} µs")
    if options.json:
        report = {
            "calls": options.calls,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "latency": figures,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
