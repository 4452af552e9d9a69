"""`headrace up`: start a deployment on this machine, in the foreground or in the background."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from services.common.addresses import bracketed
from services.common.errors import SettingsError
from services.common.logging import configure_logging
from services.common.signals import end_with_parent, handle_sighup
from services.local.artifacts import is_factorized, prepare
from services.local.lock import ProcessIdentity
from services.local.options import UpOptions
from services.local.processes import plan_processes, visible_gpus
from services.local.progress import StartProgress
from services.local.state import (
    Deployment,
    DeploymentRunning,
    StateUnreadable,
    exclusive_port,
    lock_holder,
)
from services.local.supervisor import (
    EXIT_SETTINGS_ERROR,
    ProcessSpec,
    ServiceFailed,
    Supervisor,
)

READY_TIMEOUT_S = 600.0  # the first start on a GPU compiles kernels
EXIT_RUNNING = 3  # exit code if a deployment already runs on the port

console = Console(stderr=True)


def up(options: UpOptions, *, detach: bool) -> int:
    """Start a deployment and return the exit code.

    Args:
        options: options of the deployment.
        detach: whether to run it in the background and return when it is ready. Otherwise `up`
            returns after a signal has stopped the deployment.
    """
    try:
        options.check()
        if detach:
            return _start_in_background(options)
        with exclusive_port(options.port):
            return asyncio.run(_run(options))
    except DeploymentRunning as error:
        console.print(f"[red]headrace up:[/] {error}")
        return EXIT_RUNNING
    except (SettingsError, StateUnreadable) as error:
        console.print(f"[red]headrace up:[/] {error}")
    except ServiceFailed as failure:
        console.print(f"[red]headrace up:[/] {failure}. The end of {failure.log_file}:")
        console.print(_tail(failure.log_file), markup=False, highlight=False, soft_wrap=True)
    return EXIT_SETTINGS_ERROR


def serves_dense_meanwhile(options: UpOptions) -> bool:
    """Return whether the dense model is served, and the factorized one is made in the background.

    On a GPU, factorizing takes a minute or two and memory that the workers would have.

    Raises:
        SettingsError: if the model does not exist.
    """
    if not options.dense_meanwhile or visible_gpus(options.device):
        return False
    return not is_factorized(options)


async def _run(options: UpOptions) -> int:
    """Prepare and start a deployment, and keep it running until a signal stops it."""
    configure_logging("supervisor", level="warning")
    wanted = options
    if serves_dense_meanwhile(options):
        options = replace(options, keep=None)
    token = "" if options.tls_dir else secrets.token_hex(16)
    artifacts = prepare(options, console)
    specs = plan_processes(options, artifacts, token)
    logs = Deployment.folder(options.port) / "logs"
    me = ProcessIdentity.current()

    def save_state(pids: dict[str, int]) -> None:
        Deployment(
            host=options.host,
            port=options.port,
            grpc_port=options.grpc_port,
            router_port=options.router_port,
            routers=options.routers,
            supervisor_pid=me.pid,
            supervisor_started=me.started,
            cluster_token=token,
            tls_dir=str(options.tls_dir) if options.tls_dir else None,
            pids=pids,
        ).save()

    supervisor = Supervisor(specs, logs, on_change=save_state)
    running = asyncio.create_task(supervisor.run())
    stop = asyncio.Event()
    _handle_signals(stop, supervisor)
    stopping = asyncio.create_task(stop.wait())
    factorizing: asyncio.Task[None] | None = None
    ready = asyncio.create_task(_wait_until_ready(options))
    try:
        await _show_start(specs, logs, {running, stopping, ready})
        if ready.done() and not stop.is_set():
            ready.result()
            supervisor.mark_ready()
            _print_usage(options, artifacts.served_name)
            if options is not wanted:
                factorizing = asyncio.create_task(_factorize(wanted, logs / "prepare.log"))
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (ready, stopping, factorizing):
            if task is not None:
                task.cancel()
        if not running.done():
            running.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await running
        finally:
            Deployment.forget(options.port)
    return 0


def _handle_signals(stop: asyncio.Event, supervisor: Supervisor) -> None:
    """Stop the deployment on SIGINT and SIGTERM, and pass SIGHUP on to the services."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    handle_sighup(supervisor.reload)


async def _show_start(
    specs: Sequence[ProcessSpec], logs: Path, until: set[asyncio.Task[Any]]
) -> None:
    """Print the stages of the workers' start until one of the tasks has ended."""
    with console.status(f"starting {len(specs)} processes, logs in {logs}") as status:
        workers = [spec.name for spec in specs if spec.service in ("prefill", "decode")]
        log_files = {name: logs / f"{name}.log" for name in workers}
        progress = StartProgress(log_files, console, status)
        following = asyncio.create_task(progress.follow())
        await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
        following.cancel()
        progress.poll()


async def _factorize(options: UpOptions, log_file: Path) -> None:
    """Run `headrace prepare` at low priority while the dense model is served."""
    console.print(
        f"factorizing at keep {options.keep:g} in the background, log in {log_file}; the dense "
        f"model is served until the next start"
    )
    command = [
        *(sys.executable, "-m", "services.cli", "prepare"),
        *(f"--model={options.model}", f"--keep={options.keep}", f"--device={options.device}"),
        *(f"--codec={options.wire_codec}", f"--kv-format={options.kv_format}"),
    ]

    def at_low_priority() -> None:
        os.nice(19)
        end_with_parent()

    try:
        with log_file.open("wb") as output:
            child = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, preexec_fn=at_low_priority
            )
    except (OSError, subprocess.SubprocessError) as error:
        console.print(f"[red]factorizing failed[/]: {error}")
        return
    try:
        code = await child.wait()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            child.terminate()  # the next call continues from the finished layers
        await child.wait()
        raise
    if code == 0:
        console.print(f"[green]keep {options.keep:g} is prepared[/]: the next start serves it")
    else:
        console.print(f"[red]factorizing failed[/] with exit code {code}; see {log_file}")


async def _wait_until_ready(options: UpOptions) -> None:
    """Poll the gateway until it is ready.

    Raises:
        SettingsError: if it is not ready within `READY_TIMEOUT_S`.
    """
    url = f"http://{bracketed(options.host)}:{options.port}/ready"
    reason = "it does not answer"
    deadline = time.monotonic() + READY_TIMEOUT_S
    async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError, ValueError):
                answer = await client.get(url)
                if answer.status_code == httpx.codes.OK:
                    return
                reason = answer.json().get("reason", reason)
            await asyncio.sleep(0.2)
    logs = Deployment.folder(options.port) / "logs"
    raise SettingsError(
        f"the gateway is not ready after {READY_TIMEOUT_S:.0f} s: {reason}; see the logs in {logs}"
    )


def _print_usage(options: UpOptions, model: str) -> None:
    """Print how to use the service, in one write: `_wait_for_background` reads it from a log."""
    url = f"http://{bracketed(options.host)}:{options.port}"
    body = f'{{"model":"{model}","messages":[{{"role":"user","content":"Hello!"}}]}}'
    call = f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    grpc_address = f"{bracketed(options.host)}:{options.grpc_port}"
    lines = (
        f"[green]ready[/]: {model} at {url}/v1, gRPC at {grpc_address}",
        f"  {escape(call)}",
        f"  live page at {url}/, API description at {url}/openapi.json, metrics at {url}/metrics",
        f"  Ctrl-C or `headrace down --port {options.port}` stops it",
    )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _start_in_background(options: UpOptions) -> int:
    """Run `headrace up` in a session of its own, and return once it is ready or has failed.

    Raises:
        DeploymentRunning: if a deployment on this port is running or starting.
    """
    if holder := lock_holder(options.port):
        raise DeploymentRunning(options.port, holder)
    folder = Deployment.folder(options.port)
    folder.mkdir(parents=True, exist_ok=True)
    # The child ends with EXIT_RUNNING if another `headrace up` has taken the port meanwhile. Then
    # its log must not replace the up.log of that deployment.
    log_file = folder / f"up.log.{os.getpid()}"
    with log_file.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "up", *_flags(options)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    code = _wait_for_background(child, log_file)
    console.print(_tail(log_file), markup=False, highlight=False, soft_wrap=True)
    if code == EXIT_RUNNING:
        log_file.unlink()
    else:
        log_file.replace(folder / "up.log")
    return code


def _wait_for_background(child: "subprocess.Popen[bytes]", log_file: Path) -> int:
    """Return 0 when the deployment is ready, or the exit code of a child that failed."""
    deadline = time.monotonic() + 3 * READY_TIMEOUT_S
    with console.status(f"starting in the background, log in {log_file}"):
        while time.monotonic() < deadline:
            if child.poll() is not None:
                return child.returncode or EXIT_SETTINGS_ERROR
            if b"ready:" in log_file.read_bytes():
                return 0
            time.sleep(0.2)
    console.print(f"[red]not ready after {3 * READY_TIMEOUT_S:.0f} s[/], the end of its log:")
    return EXIT_SETTINGS_ERROR


def _flags(options: UpOptions) -> list[str]:
    """Return the command-line flags of `headrace up` for these options."""
    flags = []
    for name, value in asdict(options).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags += [flag] if value else []
        elif value is not None:
            flags.append(f"{flag}={value}")
    return flags


def _tail(path: Path, lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
