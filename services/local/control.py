"""`headrace down` and `headrace status`: commands on a running deployment."""

import json
import os
import signal
from contextlib import suppress
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.common.errors import SettingsError
from services.local.lock import ProcessIdentity
from services.local.state import Deployment, StateUnreadable, lock_holder

STOP_TIMEOUT_S = 90.0  # longer than the supervisor takes to stop its processes

console = Console(stderr=True)


def down(port: int) -> int:
    """Stop the deployment on this port, wait for its end, and return the exit code."""
    try:
        deployment = Deployment.find(port)
    except StateUnreadable as error:
        console.print(f"[red]headrace down:[/] {error}")
        return 2
    supervisor = deployment.supervisor if deployment else lock_holder(port)
    if supervisor is None:
        console.print(f"no deployment is running on port {port}")
        return 1
    return _stop(supervisor)


def _stop(supervisor: ProcessIdentity) -> int:
    with (
        console.status("stopping"),
        suppress(ProcessLookupError, psutil.NoSuchProcess, psutil.TimeoutExpired),
    ):
        os.kill(supervisor.pid, signal.SIGTERM)
        psutil.Process(supervisor.pid).wait(timeout=STOP_TIMEOUT_S)
    if supervisor.alive:
        console.print(
            f"[red]process {supervisor.pid} still runs after {STOP_TIMEOUT_S:.0f} s[/]; "
            f"end it with `kill -9 {supervisor.pid}`"
        )
        return 1
    console.print("stopped")
    return 0


def status(port: int, *, as_json: bool = False) -> int:
    """Show processes and workers, and return the exit code.

    Args:
        port: HTTP port of the deployment's gateway.
        as_json: print ports and process ids to stdout as JSON instead.
    """
    try:
        deployment = Deployment.find(port)
    except StateUnreadable as error:
        console.print(f"[red]headrace status:[/] {error}")
        return 2
    if deployment is None:
        if starting := lock_holder(port):
            console.print(f"a deployment on port {port} is starting (process {starting.pid})")
        else:
            console.print(f"no deployment is running on port {port}")
        return 1
    if as_json:
        ports = {name: getattr(deployment, name) for name in ("port", "grpc_port", "router_port")}
        print(json.dumps(ports | {"processes": deployment.pids}))  # noqa: T201
        return 0
    console.print(_processes(deployment))
    try:
        console.print(_workers(deployment))
        for line in _not_ready(deployment):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    except SettingsError as error:
        console.print(f"[red]headrace status:[/] {error}")
        return 2
    except (httpx.HTTPError, ValueError) as error:
        console.print(f"[yellow]the router does not answer: {error}[/]")
        return 1
    return 0


def _processes(deployment: Deployment) -> Table:
    table = Table(
        "process", "pid", "memory", "running", title=f"headrace on port {deployment.port}"
    )
    for name, pid in sorted(deployment.pids.items()):
        try:
            process = psutil.Process(pid)
            memory = f"{process.memory_info().rss / 2**20:.0f} MiB"
            identity = ProcessIdentity.of(pid)
        except psutil.NoSuchProcess:
            memory, identity = "-", None
        running = "restarting" if identity is None else f"{identity.age_s:.0f} s"
        table.add_row(name, str(pid), memory, running)
    return table


def _workers(deployment: Deployment) -> Table:
    """Return a table of the workers that the router lists.

    Raises:
        httpx.HTTPError, ValueError: if the router does not answer, or its answer is not JSON.
    """
    answer = _ask_router(deployment, "workers")
    columns = ("worker_id", "role", "state", "queue_tokens", "pages_free", "stored_free", "reason")
    table = Table("worker", *(name.replace("_", " ") for name in columns[1:]), title="router")
    for worker in answer["workers"]:
        values = (worker.get(column) for column in columns)
        table.add_row(*("-" if value is None else escape(str(value)) for value in values))
    return table


def _not_ready(deployment: Deployment) -> list[str]:
    """Return a line for each model that is not ready, or one if there is no worker.

    Raises:
        httpx.HTTPError, ValueError: as `_workers`.
    """
    models = _ask_router(deployment, "readiness")["models"]
    if not models:
        return ["not ready: no worker is registered"]
    return [
        f"{entry['model']} is not ready: {entry['reason']}"
        for entry in models
        if not entry["ready"]
    ]


def _ask_router(deployment: Deployment, name: str) -> dict[str, Any]:
    """Return the answer of the first router that is reachable to ``GET /v1/<name>``.

    Raises:
        SettingsError: if the files of mutual TLS cannot be used.
    """
    last = deployment.routers - 1
    for number in range(deployment.routers):
        try:
            with deployment.router_client(number) as router:
                response = router.get(f"/v1/{name}").raise_for_status()
        except httpx.HTTPError:
            if number == last:
                raise
        else:
            answer: dict[str, Any] = response.json()
            return answer
    raise ValueError("the deployment has no router")
