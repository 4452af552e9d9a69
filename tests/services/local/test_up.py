"""`headrace up`: one deployment for each port, and errors of services that cannot start."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from services.common.interpreter import python_command
from services.local import background
from services.local import up as up_module
from services.local.artifacts import Artifacts
from services.local.draining import DrainProgress
from services.local.options import UpOptions
from services.local.state import EXIT_RUNNING, Deployment
from services.local.supervisor import MAX_START_FAILURES, ProcessSpec
from services.local.up import serves_dense_meanwhile, up
from tests.ports import free_ports
from tests.services.local.lock_holder import hold_elsewhere

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


ARTIFACTS = Artifacts(Path("model"), Path("model"), None, "small")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> UpOptions:
    """Options with free ports, for a model that needs no artifacts."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    artifacts = replace(ARTIFACTS, served_name="model")
    monkeypatch.setattr(up_module, "prepare", lambda options, console: artifacts)
    port, grpc_port, router_port = free_ports(3)
    return UpOptions(port=port, grpc_port=grpc_port, router_port=router_port)


def only(monkeypatch: pytest.MonkeyPatch, spec: ProcessSpec) -> None:
    monkeypatch.setattr(up_module, "plan_processes", lambda *arguments: [spec])


def output(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_taken_port_is_reported_with_the_end_of_the_log(
    options: UpOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        only(monkeypatch, ProcessSpec("router", "router", ("--port", str(port))))
        assert up(options, detach=False) == 2
    shown = output(capsys)
    assert "router exited with code 2" in shown
    assert f"cannot listen on 127.0.0.1:{port}" in shown
    assert Deployment.find(options.port) is None


def test_crashing_service_is_reported_after_a_few_starts(
    options: UpOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "quart.py").write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    only(monkeypatch, ProcessSpec("router", "router", ("--port", "0")))
    assert up(options, detach=False) == 2
    shown = output(capsys)
    assert f"router exited with code 1; it exited {MAX_START_FAILURES} times" in shown
    assert "broken on purpose" in shown


def test_second_up_on_a_port_leaves_state_and_logs_alone(
    options: UpOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first deployment holds the lock, but has not written its state yet."""
    folder = Deployment.folder(options.port)
    log_file = folder / "logs" / "router.log"
    log_file.parent.mkdir(parents=True)
    log_file.write_text("log of the first")
    only(monkeypatch, ProcessSpec("router", "router", ("--port", "-1")))
    with hold_elsewhere(folder / "lock") as first:
        for detach in (False, True):
            assert up(options, detach=detach) == EXIT_RUNNING
            assert f"already runs on port {options.port} (process {first.pid})" in output(capsys)
        assert log_file.read_text() == "log of the first"
        assert {path.name for path in folder.iterdir()} == {"lock", "logs"}
        first.kill()
    assert up(options, detach=False) == 2, "the lock is free after a crash"


def test_up_replaces_a_state_file_of_another_version(
    options: UpOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state_file = Deployment.folder(options.port) / "state.json"
    state_file.parent.mkdir(parents=True)
    state_file.write_text(json.dumps({"version": 99, "supervisor_pid": 1 << 22, "new": True}))
    only(monkeypatch, ProcessSpec("router", "router", ("--port", "-1")))
    assert up(options, detach=False) == 2
    assert "router exited with code 2" in output(capsys)
    assert not state_file.exists()


@pytest.mark.parametrize(
    ("meanwhile", "gpus", "device", "made", "expected"),
    [
        (True, "", "auto", False, True),
        (True, "0", "cpu", False, True),
        (True, "0", "auto", False, False),
        (True, "", "auto", True, False),
        (False, "", "auto", False, False),
    ],
)
def test_dense_model_is_served_while_the_cpu_factorizes(
    meanwhile: bool,
    gpus: str,
    device: str,
    made: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(up_module, "is_factorized", lambda options: made)
    options = UpOptions(keep=0.9, device=device, dense_meanwhile=meanwhile)
    assert serves_dense_meanwhile(options) == expected


def test_background_factorization_that_cannot_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    asyncio.run(up_module._factorize(UpOptions(keep=0.9), tmp_path / "prepare.log"))
    shown = output(capsys)
    assert "factorizing failed" in shown
    assert "No such file or directory" in shown


async def test_sighup_is_passed_on_to_the_services() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    supervisor = Mock()
    try:
        stop = up_module._stop_on_signals(supervisor)
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(10):
            while not supervisor.send_signal.called:  # noqa: ASYNC110 - the mock has no event
                await asyncio.sleep(0.001)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(signal.SIGHUP, previous)
    assert not stop.is_set()
    supervisor.send_signal.assert_called_with(signal.SIGHUP)


def test_ready_line_is_on_stdout_and_names_the_kv_format(
    capsys: pytest.CaptureFixture[str],
) -> None:
    up_module._print_usage(UpOptions(port=9000, grpc_port=9001, kv_format="fp8"), ARTIFACTS)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == (
        "ready: small at http://127.0.0.1:9000/v1, gRPC at 127.0.0.1:9001, KV format fp8"
    )
    assert "`headrace down --port 9000`" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("model", "first"),
    [
        ("none", "ready: minilm at http://127.0.0.1:8000/v1, gRPC at 127.0.0.1:8001"),
        (
            "small",
            "ready: small and minilm at http://127.0.0.1:8000/v1, gRPC at 127.0.0.1:8001, KV "
            "format dense",
        ),
    ],
)
def test_usage_shows_how_to_call_the_encoder(
    model: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served = "minilm" if model == "none" else "small"
    artifacts = Artifacts(Path("m"), Path("m"), None, served, Path("minilm"), "minilm")
    up_module._print_usage(UpOptions(model=model, encoder="minilm"), artifacts)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == first
    assert sum("/v1/embeddings" in line for line in lines) == 1
    assert any("/v1/chat/completions" in line for line in lines) is (model != "none")


@pytest.mark.parametrize("terminal", [False, True])
def test_ctrl_c_is_named_only_on_a_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    up_module._print_usage(UpOptions(), ARTIFACTS)
    assert ("Ctrl-C" in capsys.readouterr().out) is terminal


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a deployment of one router be ready at once."""

    async def is_ready(options: UpOptions) -> None:
        while Deployment.find(options.port) is None:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)

    monkeypatch.setattr(up_module, "_wait_until_ready", is_ready)
    only(monkeypatch, ProcessSpec("router", "router", ("--port", "0")))


@pytest.mark.usefixtures("ready")
def test_second_ctrl_c_ends_a_deployment_that_drains(
    options: UpOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The router is stopped (SIGSTOP), so that only SIGKILL ends it."""
    shown: list[str] = []

    def interrupt(options: UpOptions, model: str) -> None:
        deployment = Deployment.find(options.port)
        assert deployment is not None
        assert (deployment.model, deployment.kv_format) == ("model", "dense")
        os.kill(deployment.pids["router"], signal.SIGSTOP)
        (Deployment.logs(options.port) / "gateway.log").touch()
        signal.raise_signal(signal.SIGINT)

    def poll(progress: DrainProgress) -> None:
        if not shown:
            with (Deployment.logs(options.port) / "gateway.log").open("a") as log:
                log.write('{"event": "draining", "requests": 2}\n')
            read_log(progress)
            shown.append(capsys.readouterr().err)
            signal.raise_signal(signal.SIGINT)

    read_log = DrainProgress.poll
    monkeypatch.setattr(up_module, "_print_usage", interrupt)
    monkeypatch.setattr(DrainProgress, "poll", poll)
    assert up(options, detach=False) == 0
    assert "draining 2 requests, Ctrl-C again to stop now" in shown[0]
    assert Deployment.find(options.port) is None


@pytest.mark.usefixtures("ready")
def test_detached_deployment_passes_on_its_result_alone(
    options: UpOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = "import sys, time; print('preparing', file=sys.stderr); print('ready: small'); "
    monkeypatch.setattr(
        background,
        "headrace_command",
        lambda *_: python_command("-c", f"{child} sys.stdout.flush(); time.sleep(60)"),
    )
    start = subprocess.Popen
    children: list[subprocess.Popen[bytes]] = []

    def remember(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        children.append(start(*arguments, **options))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", remember)
    assert up(options, detach=True) == 0
    shown = capsys.readouterr()
    assert shown.out == "ready: small\n"
    assert shown.err == "preparing\n"
    children[0].kill()
    children[0].wait()
    command, *lines = (Deployment.folder(options.port) / "up.log").read_text().splitlines()
    assert "sys.stdout.flush()" in command
    assert lines == ["preparing"]


@pytest.mark.parametrize(("code", "expected"), [(0, 2), (2, 2), (3, 3), (-15, 143)])
def test_exit_code_of_a_background_process_that_ends_early(code: int, expected: int) -> None:
    assert background._exit_code(code) == expected
