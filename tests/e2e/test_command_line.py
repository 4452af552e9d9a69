"""`headrace up --detach`, `status` and `down` as a user calls them: output, ranks and a stop."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from services.local.lock import ProcessIdentity
from services.local.state import Deployment
from tests.ports import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

HEADRACE = (sys.executable, "-m", "services.cli")


def headrace(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*HEADRACE, *arguments], capture_output=True, text=True, check=True)


@pytest.fixture
def port() -> Iterator[int]:
    """A port for a deployment; the two after it are free as well."""
    port = free_ports(3)[0]
    yield port
    subprocess.run([*HEADRACE, "down", "--port", str(port)], check=False)


def test_output_of_commands_and_a_stop_during_a_request(port: int) -> None:
    started = headrace("up", "--detach", "--colocated", "--tp", "2", "--port", str(port))
    ready, *_, stop = started.stdout.splitlines()
    url = f"http://127.0.0.1:{port}"
    assert ready.endswith(f"{url}/v1, gRPC at 127.0.0.1:{port + 1}, KV format dense")
    assert f"`headrace down --port {port}`" in stop

    shown = headrace("status", "--port", str(port))
    assert shown.stderr == ""
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert sum("decode-0" in row for row in rows) == 2, "as a process and as a worker"
    assert sum("decode-0," in row for row in rows) == 1, "its second rank"
    state = json.loads(headrace("status", "--port", str(port), "--json").stdout)
    assert (state["grpc_port"], state["router_port"]) == (port + 1, port + 2)

    body = {"model": state["model"], "prompt": "a", "max_tokens": 2000, "stream": True}
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json=body | {"ignore_eos": True}) as answer,
    ):
        assert answer.status_code == httpx.codes.OK, answer.read()
        lines = answer.iter_lines()  # kept, since the end of the iterator closes the connection
        next(lines)
        down = subprocess.Popen(
            [*HEADRACE, "down", "--port", str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert down.stderr is not None
        assert down.stderr.readline() == "draining 1 request, Ctrl-C to stop now\n"
        os.kill(down.pid, signal.SIGINT)
        output, _ = down.communicate(timeout=60)
    assert down.returncode == 0
    assert output == f"stopped the deployment on port {port}\n"
    assert Deployment.find(port) is None
    (rank,) = state["ranks"]["decode-0"]
    left = map(ProcessIdentity.of, [*state["processes"].values(), rank])
    assert not list(filter(None, left))
