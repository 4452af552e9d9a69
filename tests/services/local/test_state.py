"""State file of a deployment: atomic writes, and files of other versions."""

import errno
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.errors import SettingsError
from services.local import control
from services.local.lock import ProcessIdentity
from services.local.state import (
    Deployment,
    DeploymentRunning,
    StateUnreadable,
    exclusive_port,
)
from tests.services.local.lock_holder import hold_elsewhere

pytestmark = pytest.mark.slow

PORT = 8123


@pytest.fixture(autouse=True)
def state_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    folder = Deployment.folder(PORT)
    folder.mkdir(parents=True)
    return folder / "state.json"


@pytest.fixture
def deployment() -> Deployment:
    """A deployment whose supervisor is this process."""
    me = ProcessIdentity.current()
    return Deployment(
        host="127.0.0.1",
        port=PORT,
        grpc_port=PORT + 1,
        router_port=PORT + 2,
        supervisor_pid=me.pid,
        supervisor_started=me.started,
        cluster_token="secret",
        pids={"router": 1},
    )


@pytest.fixture
def other_supervisor() -> Iterator["subprocess.Popen[str]"]:
    """A process that holds the port's lock."""
    with hold_elsewhere(Deployment.folder(PORT) / "lock") as process:
        yield process
        process.kill()


def change(path: Path, **fields: Any) -> None:
    """Replace fields of the state file; None removes one."""
    state = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in state.items() if v is not None}))


def test_saved_deployment_is_found_until_its_supervisor_ends(
    deployment: Deployment, state_file: Path
) -> None:
    assert Deployment.find(PORT) is None
    deployment.save()
    assert Deployment.find(PORT) == deployment
    assert state_file.stat().st_mode & 0o777 == 0o600
    replace(deployment, supervisor_started=1.0).save()
    assert Deployment.find(PORT) is None


def test_unknown_fields_are_accepted(deployment: Deployment, state_file: Path) -> None:
    deployment.save()
    change(state_file, added_later=["anything"])
    assert Deployment.find(PORT) == deployment


def test_state_without_the_folder_of_mutual_tls_is_accepted(
    deployment: Deployment, state_file: Path
) -> None:
    deployment.save()
    state = json.loads(state_file.read_text())
    del state["tls_dir"]  # as in states of earlier versions
    state_file.write_text(json.dumps(state))
    assert Deployment.find(PORT) == deployment


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 3}, "format version is 3, not 2"),
        ({"cluster_token": None}, "field cluster_token is None"),
        ({"pids": [1]}, r"field pids is \[1\]"),
    ],
)
def test_state_of_another_version_is_an_error_that_says_what_to_do(
    deployment: Deployment,
    state_file: Path,
    fields: dict[str, Any],
    reason: str,
) -> None:
    deployment.save()
    change(state_file, **fields)
    with pytest.raises(StateUnreadable, match=reason) as error:
        Deployment.find(PORT)
    assert f"kill {deployment.supervisor_pid}" in str(error.value)
    for command in (control.down, control.status):
        with pytest.raises(StateUnreadable, match="Another version"):
            command(PORT)


def test_failed_save_keeps_the_last_state_and_leaves_no_draft(
    deployment: Deployment, state_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.save()

    def fail(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space left"):
        replace(deployment, pids={"router": 2}).save()
    assert Deployment.find(PORT) == deployment
    assert [path.name for path in state_file.parent.iterdir()] == ["state.json"]


def test_status_shows_why_requests_cannot_be_placed(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "prefill-0 and decode-0 are not compatible: kv_format is 'fp8' and 'dense'"
    answers = {
        "/v1/workers": {
            "workers": [
                {"worker_id": "decode-7", "role": "decode", "state": "ready", "reason": "codec [x]"}
            ]
        },
        "/v1/readiness": {
            "models": [
                {"model": "small", "ready": False, "reason": reason},
                {"model": "big", "ready": True, "reason": None},
            ]
        },
        "/v1/encoders": {
            "workers": [],
            "models": [{"model": "tiny", "ready": False, "reason": "no encoder worker is ready"}],
        },
    }

    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path]).encode())

    with HTTPServer(("127.0.0.1", 0), Router) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        replace(deployment, router_port=server.server_port).save()
        assert control.status(PORT) == 0
        server.shutdown()
    shown = " ".join(capsys.readouterr().out.split())
    assert f"small is not ready: {reason}" in shown
    assert "tiny is not ready: no encoder worker is ready" in shown
    assert "big" not in shown
    assert "decode-7" in shown
    assert "codec [x]" in shown


def test_status_names_files_of_mutual_tls_that_cannot_be_used(
    deployment: Deployment, tmp_path: Path
) -> None:
    replace(deployment, tls_dir=str(tmp_path / "missing")).save()
    with pytest.raises(SettingsError, match="missing"):
        control.status(PORT)


def test_state_without_the_number_of_routers_has_one(
    deployment: Deployment, state_file: Path
) -> None:
    replace(deployment, routers=2).save()
    found = Deployment.find(PORT)
    assert found is not None
    assert found.routers == 2
    change(state_file, routers=None)
    assert Deployment.find(PORT) == deployment


def test_running_deployment_of_version_1_is_named(deployment: Deployment, state_file: Path) -> None:
    deployment.save()
    change(state_file, version=None, supervisor_started=psutil.Process().create_time())
    with pytest.raises(StateUnreadable, match=f"version is 1, not 2.*{deployment.supervisor_pid}"):
        Deployment.find(PORT)
    change(state_file, supervisor_started=1.0)
    assert Deployment.find(PORT) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"version": 7}', "{}"])
def test_damaged_state_without_a_supervisor_is_ignored(state_file: Path, content: str) -> None:
    state_file.write_text(content)
    assert Deployment.find(PORT) is None
    with exclusive_port(PORT):
        assert Deployment.find(PORT) is None


@pytest.mark.parametrize("content", ["", "[]", '{"version": 7}'])
def test_damaged_state_of_a_running_supervisor_names_its_process(
    state_file: Path, other_supervisor: "subprocess.Popen[str]", content: str
) -> None:
    state_file.write_text(content)
    with pytest.raises(StateUnreadable, match=f"kill {other_supervisor.pid}"):
        Deployment.find(PORT)


def test_port_is_exclusive_while_its_holder_lives(
    other_supervisor: "subprocess.Popen[str]",
) -> None:
    with (
        pytest.raises(DeploymentRunning, match=f"port {PORT} .process {other_supervisor.pid}"),
        exclusive_port(PORT),
    ):
        pass
    other_supervisor.kill()
    other_supervisor.wait()
    with exclusive_port(PORT):
        pass


def test_deployment_of_a_version_without_locks_is_detected(deployment: Deployment) -> None:
    deployment.save()
    with pytest.raises(DeploymentRunning), exclusive_port(PORT):
        pass


def test_down_stops_a_deployment_that_has_no_state_yet(
    other_supervisor: "subprocess.Popen[str]", capsys: pytest.CaptureFixture[str]
) -> None:
    assert control.status(PORT) == 1
    assert f"starting (process {other_supervisor.pid})" in capsys.readouterr().err
    assert control.down(PORT) == 0
    assert other_supervisor.wait() == -signal.SIGTERM
    assert control.down(PORT) == 1
    assert "no deployment is running" in capsys.readouterr().err


def test_down_accepts_a_supervisor_that_has_just_ended(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(_pid: int, _signal: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr("os.kill", ended)
    gone = replace(deployment.supervisor, pid=1 << 22)
    assert control._stop(PORT, gone, limit_s=60) == 0
    assert "stopped" in capsys.readouterr().out


def test_clients_of_an_ipv6_router_have_its_address_in_brackets(deployment: Deployment) -> None:
    with replace(deployment, host="::1").router_client() as client:
        assert client.base_url.host == "::1"
