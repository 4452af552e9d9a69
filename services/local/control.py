"""`headrace down` and `headrace status`: commands on running deployments."""

import json
import os
import signal
import time
from contextlib import suppress
from typing import Any

import httpx
import psutil
from rich.markup import escape
from rich.table import Table

from services.common.errors import SettingsError
from services.common.terminal import diagnostics, results
from services.local.draining import DrainProgress
from services.local.lock import ProcessIdentity
from services.local.logs import POLL_S
from services.local.state import Deployment, lock_holder, ports_in_use

_SPAWNED = "--multiprocessing-fork"
"""Argument of every process that multiprocessing spawns."""
_PREPARATION_STOP_S = 90.0
"""Maximum time to stop a deployment that is still prepared, seconds."""


def down(port: int | None) -> int:
    """Stop a deployment, wait for its end, and return the exit code.

    Args:
        port: HTTP port of its gateway; None for the only deployment that runs.

    Raises:
        SettingsError: if several deployments run and ``port`` is None.
        StateUnreadable: if another version of Headrace has started it.
    """
    running = ports_in_use()
    if port is None and len(running) > 1:
        raise SettingsError(f"{_describe(running)}: choose one with --port")
    if port is None and running:
        port = running[0]
    deployment = None if port is None else Deployment.find(port)
    supervisor = None if port is None else _supervisor(port, deployment)
    if port is None or supervisor is None:
        _print_none_running(port, running)
        return 1
    return _stop(port, supervisor, deployment.stop_s if deployment else _PREPARATION_STOP_S)


def _supervisor(port: int, deployment: Deployment | None) -> ProcessIdentity | None:
    """Return the process of `headrace up` on a port, or None if none runs."""
    return deployment.supervisor if deployment else lock_holder(port)


def _stop(port: int, supervisor: ProcessIdentity, limit_s: float) -> int:
    console = diagnostics()
    deadline = time.monotonic() + limit_s
    with DrainProgress(Deployment.logs(port), console, "Ctrl-C to stop now") as progress:
        _signal(supervisor, signal.SIGTERM)
        while supervisor.alive and time.monotonic() < deadline:
            try:
                progress.poll()
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                _signal(supervisor, signal.SIGINT)
    if supervisor.alive:
        console.print(
            f"[red]process {supervisor.pid} still runs after {limit_s:.0f} s[/]; "
            f"end it with `kill -9 {supervisor.pid}`"
        )
        return 1
    results().print(f"stopped the deployment on port {port}")
    return 0


def _signal(process: ProcessIdentity, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)


def status(port: int | None, *, as_json: bool = False) -> int:
    """Show processes and workers, and return the exit code.

    Args:
        port: HTTP port of a deployment's gateway; None for all deployments that run.
        as_json: print the state of each deployment as JSON in one line instead.

    Raises:
        SettingsError: if the files of mutual TLS cannot be used.
        StateUnreadable: if another version of Headrace has started a deployment.
    """
    running = ports_in_use()
    if not running or (port is not None and port not in running):
        _print_none_running(port, running)
        return 1
    return max(_show(each, as_json=as_json) for each in (running if port is None else [port]))


def _show(port: int, *, as_json: bool) -> int:
    deployment = Deployment.find(port)
    if deployment is None:
        holder = lock_holder(port)
        process = f" (process {holder.pid})" if holder else ""
        diagnostics().print(f"a deployment on port {port} is starting{process}")
        return 1
    if as_json:
        names = ("port", "grpc_port", "router_port", "model", "kv_format", "encoder")
        described = {name: getattr(deployment, name) for name in names}
        ranks = {name: [rank.pid for rank in _ranks(pid)] for name, pid in deployment.pids.items()}
        others = {name: pids for name, pids in ranks.items() if pids}
        print(json.dumps(described | {"processes": deployment.pids, "ranks": others}))  # noqa: T201
        return 0
    console = results()
    model = f"{deployment.model}, KV format {deployment.kv_format}" if deployment.model else ""
    encoder = f"encoder {deployment.encoder}" if deployment.encoder else ""
    served = ", ".join(filter(None, (model, encoder)))
    title = f"headrace on port {port}" + (f": {served}" if served else "")
    console.print(title, markup=False, soft_wrap=True)
    console.print(_processes(deployment))
    try:
        console.print(_workers(deployment))
        for line in _not_ready(deployment):
            console.print(line, markup=False, soft_wrap=True)
    except (httpx.HTTPError, ValueError) as error:
        diagnostics().print(f"the router does not answer: {error}", style="yellow", markup=False)
        return 1
    return 0


def _print_none_running(port: int | None, running: list[int]) -> None:
    where = "" if port is None else f" on port {port}"
    others = f"; {_describe(running)}" if running else ""
    diagnostics().print(f"no deployment is running{where}{others}", markup=False)


def _describe(running: list[int]) -> str:
    if len(running) == 1:
        return f"one is running on port {running[0]}"
    return f"deployments are running on ports {', '.join(map(str, running))}"


def _processes(deployment: Deployment) -> Table:
    table = Table("process", "pid", "memory", "running")
    for name, pid in sorted(deployment.pids.items()):
        table.add_row(name, *_process(pid))
        for number, rank in enumerate(_ranks(pid), 1):
            table.add_row(f"{name}, rank {number}", *_process(rank.pid))
    return table


def _process(pid: int) -> tuple[str, str, str]:
    """Return the process id, the memory and the age of a process, as text."""
    try:
        memory = f"{psutil.Process(pid).memory_info().rss / 2**20:.0f} MiB"
        identity = ProcessIdentity.of(pid)
    except psutil.NoSuchProcess:
        memory = "-"
        identity = None
    running = "restarting" if identity is None else f"{identity.age_s:.0f} s"
    return str(pid), memory, running


def _ranks(pid: int) -> list[psutil.Process]:
    """Return the processes of a worker's ranks other than the first, in the order of their start.

    They are its children that multiprocessing has spawned, except the resource tracker.
    """
    try:
        children = psutil.Process(pid).children()
        ranks = [child for child in children if _SPAWNED in child.cmdline()]
        return sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))
    except psutil.Error:  # a process has ended meanwhile
        return []


def _workers(deployment: Deployment) -> Table:
    """Return a table of the workers that the router lists.

    Raises:
        httpx.HTTPError, ValueError: if the router does not answer, or its answer is not JSON.
    """
    answer = _ask_router(deployment, "workers")
    columns = ("worker_id", "role", "state", "queue_tokens", "pages_free", "reason")
    table = Table("worker", *(name.replace("_", " ") for name in columns[1:]), title="router")
    encoders = [
        each | {"role": "encoder"} for each in _ask_router(deployment, "encoders")["workers"]
    ]
    for worker in answer["workers"] + encoders:
        table.add_row(*(escape(_text(worker.get(column))) for column in columns))
    return table


def _text(value: object) -> str:
    """Return a property of a worker as text; numbers by page group as ``group number``."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return "-" if value is None else str(value)


def _not_ready(deployment: Deployment) -> list[str]:
    """Return a line for each model that is not ready, or one if there is no worker.

    Raises:
        httpx.HTTPError, ValueError: as `_workers`.
    """
    models = [
        *_ask_router(deployment, "readiness")["models"],
        *_ask_router(deployment, "encoders")["models"],
    ]
    if not models:
        return ["not ready: no worker is registered"]
    return [
        f"{entry['model']} is not ready: {entry['reason']}"
        for entry in models
        if not entry["ready"]
    ]


def _ask_router(deployment: Deployment, name: str) -> dict[str, Any]:
    """Return the answer to ``GET /v1/<name>`` of the first router that is reachable.

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
