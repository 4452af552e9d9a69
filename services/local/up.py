"""`headrace up`, `down` and `status`: a whole deployment on one machine."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from services.common.errors import SettingsError
from services.common.logging import configure_logging
from services.local.artifacts import prepare
from services.local.options import UpOptions
from services.local.processes import plan_processes
from services.local.state import Deployment
from services.local.supervisor import ServiceFailed, Supervisor

READY_TIMEOUT_S = 600.0  # the first start on a GPU compiles its kernels

console = Console(stderr=True)


def up(options: UpOptions, *, detach: bool) -> int:
    """Starts a deployment and returns the exit code; in the foreground when it was ended."""
    try:
        options.check()
        if found := Deployment.find(options.port):
            console.print(f"already up on port {found.port}; `headrace down --port {found.port}`")
            return 1
        if detach:
            return _detach(options)
        return asyncio.run(_run(options))
    except SettingsError as error:
        console.print(f"[red]headrace up:[/] {error}")
        return 2
    except ServiceFailed as failure:
        console.print(f"[red]{failure}[/]; the end of {failure.log_file}:")
        console.print(_tail(failure.log_file), markup=False, highlight=False)
        return 2


def down(port: int) -> int:
    """Stops the deployment on this port and waits until it is gone."""
    deployment = Deployment.find(port)
    if deployment is None:
        console.print(f"nothing is up on port {port}")
        return 1
    with console.status("stopping"):
        os.kill(deployment.supervisor_pid, signal.SIGTERM)
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            psutil.Process(deployment.supervisor_pid).wait(timeout=90)
    if deployment.alive:
        console.print(f"[red]supervisor {deployment.supervisor_pid} does not end[/]")
        return 1
    console.print("stopped")
    return 0


def status(port: int, *, as_json: bool = False) -> int:
    """Shows processes and workers; as JSON, ports and the pids of processes."""
    deployment = Deployment.find(port)
    if deployment is None:
        console.print(f"nothing is up on port {port}")
        return 1
    if as_json:
        ports = {name: getattr(deployment, name) for name in ("port", "grpc_port", "router_port")}
        print(json.dumps(ports | {"processes": deployment.pids}))  # noqa: T201
        return 0
    processes = Table("process", "pid", "memory", "running", title=f"headrace on port {port}")
    for name, pid in sorted(deployment.pids.items()):
        try:
            process = psutil.Process(pid)
            memory = f"{process.memory_info().rss / 2**20:.0f} MiB"
            since = f"{time.time() - process.create_time():.0f} s"
        except psutil.NoSuchProcess:
            memory, since = "-", "restarting"
        processes.add_row(name, str(pid), memory, since)
    console.print(processes)
    try:
        answer = httpx.get(
            f"http://{deployment.host}:{deployment.router_port}/v1/workers",
            headers={"authorization": f"Bearer {deployment.cluster_token}"},
            trust_env=False,
        ).json()
    except (httpx.HTTPError, ValueError) as error:
        console.print(f"[yellow]the router does not answer: {error}[/]")
        return 1
    workers = Table("worker", "role", "state", "queue tokens", "pages free", title="router")
    for worker in answer["workers"]:
        columns = ("worker_id", "role", "state", "queue_tokens", "pages_free")
        workers.add_row(*(str(worker.get(column, "-")) for column in columns))
    console.print(workers)
    return 0


async def _run(options: UpOptions) -> int:
    """The foreground: prepare, start, say how to talk to it, keep it until a signal."""
    configure_logging("supervisor", level="warning")
    token = secrets.token_hex(16)
    artifacts = prepare(options, console)
    specs = plan_processes(options, artifacts, token)
    folder = Deployment.folder(options.port)

    def remember(pids: dict[str, int]) -> None:
        Deployment(
            host=options.host,
            port=options.port,
            grpc_port=options.grpc_port,
            router_port=options.router_port,
            supervisor_pid=os.getpid(),
            supervisor_started=psutil.Process().create_time(),
            cluster_token=token,
            pids=pids,
        ).save()

    supervisor = Supervisor(specs, folder / "logs", on_change=remember)
    running = asyncio.create_task(supervisor.run())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(_wait_until_ready(options))
    try:
        with console.status(f"starting {len(specs)} processes, logs in {folder / 'logs'}"):
            await asyncio.wait({running, stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and not stop.is_set():
            ready.result()
            _greet(options, artifacts.served_name)
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
        stopping.cancel()
        if not running.done():
            running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        Deployment.forget(options.port)
    return 0


async def _wait_until_ready(options: UpOptions) -> None:
    """Until the gateway says it can serve.

    Raises:
        SettingsError: it did not within `READY_TIMEOUT_S`.
    """
    url = f"http://{options.host}:{options.port}/ready"
    deadline = time.monotonic() + READY_TIMEOUT_S
    async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if (await client.get(url)).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(0.2)
    raise SettingsError(f"not ready after {READY_TIMEOUT_S:.0f} s; `headrace status` tells more")


def _greet(options: UpOptions, model: str) -> None:
    url = f"http://{options.host}:{options.port}"
    body = f'{{"model":"{model}","messages":[{{"role":"user","content":"Hello!"}}]}}'
    console.print(
        f"[green]ready[/]: {model} at {url}/v1, gRPC at {options.host}:{options.grpc_port}"
    )
    console.print(
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"  docs at {url}/docs, metrics at {url}/metrics; Ctrl-C or `headrace down` stops it"
    )


def _detach(options: UpOptions) -> int:
    """Runs `headrace up` again in a session of its own, and returns once it is ready."""
    folder = Deployment.folder(options.port)
    folder.mkdir(parents=True, exist_ok=True)
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in asdict(options).items()
        if value is not None and not isinstance(value, bool)
    ]
    if options.colocated:
        flags.append("--colocated")
    log_file = folder / "up.log"
    with log_file.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "up", *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + 3 * READY_TIMEOUT_S
    with console.status(f"starting in the background, log in {log_file}"):
        while time.monotonic() < deadline:
            if child.poll() is not None:
                console.print(_tail(log_file), markup=False, highlight=False)
                return child.returncode or 1
            if b"ready:" in log_file.read_bytes():
                console.print(_tail(log_file), markup=False, highlight=False)
                return 0
            time.sleep(0.2)
    console.print(f"[red]not ready[/]; see {log_file}")
    return 1


def _tail(path: Path, lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
