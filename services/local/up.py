"""`headrace up`: start a deployment on this machine and keep it running, in the foreground."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from services.common.addresses import bracketed
from services.common.errors import SettingsError
from services.common.http_server import listen
from services.common.interpreter import headrace_command
from services.common.logging import configure_logging
from services.common.signals import (
    end_on_sigterm_as_first_process,
    end_with_parent,
    handle_sighup,
)
from services.common.terminal import diagnostics, results
from services.local.artifacts import Artifacts, is_factorized, prepare
from services.local.background import start_in_background
from services.local.draining import DrainProgress
from services.local.gpus import assign_gpus, visible_gpus
from services.local.lock import ProcessIdentity
from services.local.logs import poll_periodically, tail
from services.local.options import UpOptions
from services.local.processes import plan_processes
from services.local.progress import StartProgress
from services.local.state import EXIT_RUNNING, Deployment, DeploymentRunning, exclusive_port
from services.local.supervisor import (
    EXIT_SETTINGS_ERROR,
    ProcessSpec,
    ServiceFailed,
    Supervisor,
    stop_s,
)

console = diagnostics()

READY_TIMEOUT_S = 600.0
"""Maximum time until a deployment is ready, seconds. The first start on a GPU compiles kernels."""
_WORKERS = ("prefill", "decode", "encoder")


def up(options: UpOptions, *, detach: bool) -> int:
    """Start a deployment and return the exit code.

    Args:
        options: options of the deployment.
        detach: whether to run it in the background and return when it is ready. Otherwise `up`
            returns after a signal has stopped the deployment.

    Raises:
        SettingsError, RuntimeFault, OSError: if it cannot start.
    """
    options.check()
    assign_gpus(visible_gpus(options.device), [worker.ranks for worker in options.workers])
    try:
        if detach:
            return start_in_background(options)
        with exclusive_port(options.port):
            return _run(options)
    except DeploymentRunning as error:
        console.print(f"headrace up: {error}", markup=False)
        return EXIT_RUNNING
    except ServiceFailed as failure:
        console.print(f"headrace up: {failure}. The end of {failure.log_file}:", markup=False)
        console.print(tail(failure.log_file), markup=False)
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


def _run(options: UpOptions) -> int:
    """Prepare a deployment, and keep it running until a signal stops it."""
    _check_ports_are_free(options)
    configure_logging("supervisor", level="warning")
    end_on_sigterm_as_first_process()
    later = options if serves_dense_meanwhile(options) else None
    if later is not None:
        options = replace(options, keep=None)
    artifacts = prepare(options, console)  # not in the event loop, which would delay Ctrl-C
    return asyncio.run(_serve(options, artifacts, later))


def _check_ports_are_free(options: UpOptions) -> None:
    """Check before a long preparation that the gateway and the routers can listen.

    Raises:
        SettingsError: if the host is not an address of this machine, or if a port is in use.
    """
    for flag, port in options.ports:
        try:
            listen(options.host, port).close()
        except SettingsError as error:
            raise SettingsError(f"{error}; choose another {flag}") from error


async def _serve(options: UpOptions, artifacts: Artifacts, later: UpOptions | None) -> int:
    """Run a deployment until SIGINT or SIGTERM, or until a service cannot start.

    Args:
        later: options of the model to factorize in the background; None for none.
    """
    token = "" if options.tls_dir else secrets.token_hex(16)
    specs = plan_processes(options, artifacts, token)
    logs = Deployment.logs(options.port)
    state = replace(_state(options, artifacts, token), stop_s=stop_s(specs))
    supervisor = Supervisor(specs, logs, on_change=lambda pids: replace(state, pids=pids).save())
    running = asyncio.create_task(supervisor.run())
    stop = _stop_on_signals(supervisor)
    stopping = asyncio.create_task(stop.wait())
    factorizing: asyncio.Task[None] | None = None
    ready = asyncio.create_task(_wait_until_ready(options))
    try:
        await _show_start(specs, logs, {running, stopping, ready})
        if ready.done() and not stop.is_set():
            ready.result()
            supervisor.mark_ready()
            _print_usage(options, artifacts)
            if later is not None:
                factorizing = asyncio.create_task(_factorize(later, logs / "prepare.log"))
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (ready, stopping, factorizing):
            if task is not None:
                task.cancel()
        try:
            await _end(running, logs)
        finally:
            Deployment.forget(options.port)
    return 0


def _state(options: UpOptions, artifacts: Artifacts, token: str) -> Deployment:
    """Return the deployment for the state file, without its processes."""
    me = ProcessIdentity.current()
    return Deployment(
        host=options.host,
        port=options.port,
        grpc_port=options.grpc_port,
        router_port=options.router_port,
        routers=options.routers,
        supervisor_pid=me.pid,
        supervisor_started=me.started,
        cluster_token=token,
        tls_dir=str(options.tls_dir) if options.tls_dir else None,
        model=artifacts.served_name if options.generates else "",
        kv_format=options.kv_format if options.generates else "",
        encoder=artifacts.encoder_name,
        pids={},
    )


def _stop_on_signals(supervisor: Supervisor) -> asyncio.Event:
    """Return an event that SIGINT or SIGTERM sets, and pass SIGHUP on to the services.

    SIGINT during the stop ends all processes.
    """
    stop = asyncio.Event()

    def interrupt() -> None:
        if stop.is_set():
            supervisor.send_signal(signal.SIGKILL)
        stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    handle_sighup(partial(supervisor.send_signal, signal.SIGHUP))
    return stop


async def _end(running: "asyncio.Task[None]", logs: Path) -> None:
    """Stop the processes, and print how many requests must finish first.

    Raises:
        ServiceFailed: if a service could not start.
    """
    with suppress(asyncio.CancelledError):
        if running.done():
            return await running
        with DrainProgress(logs, console, "Ctrl-C again to stop now") as progress:
            running.cancel()
            following = asyncio.create_task(poll_periodically(progress.poll))
            try:
                await running
            finally:
                following.cancel()


async def _show_start(
    specs: Sequence[ProcessSpec], logs: Path, until: set[asyncio.Task[Any]]
) -> None:
    """Print the stages of the workers' start until one of the tasks has ended."""
    with console.status(f"starting {len(specs)} processes, logs in {logs}") as status:
        workers = [spec.name for spec in specs if spec.service in _WORKERS]
        log_files = {name: logs / f"{name}.log" for name in workers}
        progress = StartProgress(log_files, console, status)
        following = asyncio.create_task(poll_periodically(progress.poll))
        await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
        following.cancel()
        progress.poll()


async def _factorize(options: UpOptions, log_file: Path) -> None:
    """Run `headrace prepare` at low priority while the dense model is served."""
    console.print(
        f"factorizing at keep {options.keep:g} in the background, log in {log_file}; the dense "
        f"model is served until the next start"
    )
    command = headrace_command(
        *("prepare", f"--model={options.model}", f"--keep={options.keep}"),
        *(f"--device={options.device}", f"--codec={options.wire_codec}"),
        f"--kv-format={options.kv_format}",
    )

    def at_low_priority() -> None:
        os.nice(19)
        end_with_parent()

    try:
        with log_file.open("wb") as output:
            child = await asyncio.create_subprocess_exec(
                *command,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a terminal would send SIGINT to it as well
                preexec_fn=at_low_priority,
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
    raise SettingsError(
        f"the gateway is not ready after {READY_TIMEOUT_S:.0f} s: {reason}; "
        f"see the logs in {Deployment.logs(options.port)}"
    )


def _print_usage(options: UpOptions, artifacts: Artifacts) -> None:
    """Print how to use the service, in one write: it is the only output to stdout."""
    url = f"http://{bracketed(options.host)}:{options.port}"
    model, encoder = artifacts.served_name, artifacts.encoder_name
    served = f"{model} and {encoder}" if options.generates and encoder else model
    kv_format = f", KV format {options.kv_format}" if options.generates else ""
    grpc_address = f"{bracketed(options.host)}:{options.grpc_port}"
    lines = [f"ready: {served} at {url}/v1, gRPC at {grpc_address}{kv_format}"]
    if options.generates:
        messages = '[{"role":"user","content":"What is the capital of France?"}]'
        body = f'{{"model":"{model}","messages":{messages},"temperature":0}}'
        lines.append(_curl(f"{url}/v1/chat/completions", body))
    if encoder:
        lines.append(_curl(f"{url}/v1/embeddings", f'{{"model":"{encoder}","input":"Hello"}}'))
    interrupt = "Ctrl-C or " if sys.stderr.isatty() else ""  # --detach has no terminal
    lines += [
        f"  live page at {url}/, API description at {url}/openapi.json, metrics at {url}/metrics",
        f"  {interrupt}`headrace down --port {options.port}` stops it",
    ]
    results().print("\n".join(lines), markup=False, soft_wrap=True)


def _curl(url: str, body: str) -> str:
    return f"  curl {url} -H 'content-type: application/json' -d '{body}'"
