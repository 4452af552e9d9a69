"""`headrace down` and `headrace status`: selected deployments, and output by stream."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from services.common.errors import SettingsError
from services.local import control
from services.local.draining import DrainProgress
from services.local.lock import ProcessIdentity
from services.local.state import Deployment
from tests.services.local.lock_holder import hold_elsewhere

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

FIRST, SECOND, NONE = 8123, 8200, 8300

STUBBORN = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("draining", flush=True))
signal.signal(signal.SIGINT, lambda *_: sys.exit())
print("started", flush=True)
while True:
    signal.pause()
"""


WITH_RANKS = """
import json, multiprocessing, subprocess, sys
from multiprocessing import resource_tracker

context = multiprocessing.get_context("spawn")
tracker = resource_tracker.ensure_running()
end = context.Event()
ranks = [context.Process(target=end.wait) for _ in range(2)]
for rank in ranks:
    rank.start()
other = subprocess.Popen(["sleep", "60"])
print(json.dumps([rank.pid for rank in ranks]), flush=True)
sys.stdin.read()
end.set()
other.kill()
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def supervisors() -> Iterator[dict[int, "subprocess.Popen[str]"]]:
    """Processes that hold the locks of two ports, as `headrace up` does."""
    with ExitStack() as stack:
        held: dict[int, subprocess.Popen[str]] = {}
        for port in (FIRST, SECOND):
            held[port] = stack.enter_context(hold_elsewhere(Deployment.folder(port) / "lock"))
            stack.callback(held[port].kill)
        yield held


def saved(supervisor: "subprocess.Popen[str]", **fields: object) -> Deployment:
    """Save the state of a deployment of this process."""
    identity = ProcessIdentity.of(supervisor.pid)
    assert identity is not None
    deployment = Deployment(
        host="127.0.0.1",
        port=FIRST,
        grpc_port=FIRST + 1,
        router_port=FIRST + 2,
        supervisor_pid=identity.pid,
        supervisor_started=identity.started,
        cluster_token="secret",
        pids={"router": identity.pid},
        model="small",
        kv_format="fp8",
    )
    deployment = replace(deployment, **fields)  # type: ignore[arg-type]
    deployment.save()
    return deployment


def test_down_without_a_port_stops_the_only_deployment(
    supervisors: dict[int, "subprocess.Popen[str]"], capsys: pytest.CaptureFixture[str]
) -> None:
    supervisors[FIRST].kill()
    supervisors[FIRST].wait()
    assert control.down(None) == 0
    assert capsys.readouterr().out == f"stopped the deployment on port {SECOND}\n"
    assert supervisors[SECOND].wait() == -signal.SIGTERM
    assert control.down(None) == 1
    assert capsys.readouterr().err == "no deployment is running\n"


def test_down_without_a_port_does_not_choose_among_several(
    supervisors: dict[int, "subprocess.Popen[str]"],
) -> None:
    with pytest.raises(SettingsError, match=f"on ports {FIRST}, {SECOND}: choose one with --port"):
        control.down(None)
    assert all(process.poll() is None for process in supervisors.values())


@pytest.mark.parametrize("command", [control.down, control.status])
def test_port_without_a_deployment_is_an_error_that_lists_the_others(
    supervisors: dict[int, "subprocess.Popen[str]"],
    capsys: pytest.CaptureFixture[str],
    command: Callable[[int], int],
) -> None:
    assert command(NONE) == 1
    assert capsys.readouterr().err == (
        f"no deployment is running on port {NONE}; "
        f"deployments are running on ports {FIRST}, {SECOND}\n"
    )


def test_status_without_a_port_shows_all_deployments(
    supervisors: dict[int, "subprocess.Popen[str]"], capsys: pytest.CaptureFixture[str]
) -> None:
    saved(supervisors[FIRST])
    assert control.status(None, as_json=True) == 1, "the second one is not ready"
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    assert json.loads(line) == {
        "port": FIRST,
        "grpc_port": FIRST + 1,
        "router_port": FIRST + 2,
        "model": "small",
        "kv_format": "fp8",
        "encoder": "",
        "processes": {"router": supervisors[FIRST].pid},
        "ranks": {},
    }
    assert f"port {SECOND} is starting (process {supervisors[SECOND].pid})" in shown.err


def test_status_prints_whole_rows_to_stdout_and_errors_to_stderr(
    supervisors: dict[int, "subprocess.Popen[str]"], capsys: pytest.CaptureFixture[str]
) -> None:
    reason = " ".join(["a reason that is longer than a line of a terminal"] * 3)
    worker = {"worker_id": "decode-0", "role": "decode", "state": "ready", "reason": reason}
    answers: dict[str, object] = {
        "/v1/workers": {"workers": [worker]},
        "/v1/readiness": {"models": []},
        "/v1/encoders": {"workers": [{"worker_id": "encoder-0", "state": "ready"}], "models": []},
    }

    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path]).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Router) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        saved(supervisors[FIRST], router_port=server.server_port)
        assert control.status(FIRST) == 0
        server.shutdown()
    shown = capsys.readouterr()
    assert f"headrace on port {FIRST}: small, KV format fp8" in shown.out
    (row,) = [line for line in shown.out.splitlines() if "decode-0" in line]
    assert reason in row
    (row,) = [line for line in shown.out.splitlines() if "encoder-0" in line]
    assert " encoder " in row
    assert shown.err == ""
    assert control.status(FIRST) == 1  # the router has ended
    shown = capsys.readouterr()
    assert "the router does not answer" in shown.err
    assert "small" in shown.out


def test_status_shows_the_ranks_of_a_worker(
    supervisors: dict[int, "subprocess.Popen[str]"], capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker with two more ranks. A child that multiprocessing has not spawned is none."""
    with subprocess.Popen(
        [sys.executable, "-c", WITH_RANKS], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        ranks = json.loads(worker.stdout.readline())
        saved(supervisors[FIRST], pids={"decode-0": worker.pid}, router_port=1)
        control.status(FIRST)
        table = capsys.readouterr().out
        assert control.status(FIRST, as_json=True) == 0
        found = json.loads(capsys.readouterr().out)
        worker.communicate()
    assert found["processes"] == {"decode-0": worker.pid}
    assert found["ranks"] == {"decode-0": ranks}
    rows = [line.split("│")[1:3] for line in table.splitlines() if "decode-0" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["decode-0", str(worker.pid)],
        ["decode-0, rank 1", str(ranks[0])],
        ["decode-0, rank 2", str(ranks[1])],
    ]


def test_ctrl_c_in_down_ends_a_deployment_that_drains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first poll after the deployment has begun to drain is interrupted, as by Ctrl-C."""
    logs = Deployment.logs(FIRST)
    logs.mkdir(parents=True)
    (logs / "gateway.log").touch()
    poll = DrainProgress.poll
    interrupted = threading.Event()

    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "started\n"
        identity = ProcessIdentity.of(supervisor.pid)
        assert identity is not None

        def poll_once_draining(progress: DrainProgress) -> None:
            if not interrupted.is_set():
                assert supervisor.stdout is not None
                assert supervisor.stdout.readline() == "draining\n"
                with (logs / "gateway.log").open("a") as log:
                    log.write('{"event": "draining", "requests": 1}\n')
            poll(progress)
            if not interrupted.is_set():
                interrupted.set()
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(DrainProgress, "poll", poll_once_draining)
        reaper = threading.Thread(target=supervisor.wait)  # a zombie counts as ended as well
        reaper.start()
        assert control._stop(FIRST, identity, limit_s=60) == 0
        reaper.join()
        assert supervisor.returncode == 0
    shown = capsys.readouterr()
    assert shown.err == "draining 1 request, Ctrl-C to stop now\n"
    assert shown.out == f"stopped the deployment on port {FIRST}\n"
