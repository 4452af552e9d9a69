"""A complete deployment on loopback, started by `headrace up`."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import grpc
import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from headrace.v1.inference_pb2_grpc import InferenceStub
from services.common.addresses import is_loopback
from services.local.state import Deployment
from tests.harness.belongings import is_running
from tests.ports import free_ports

RESTART_S = 180.0  # maximum time of a restart; a busy machine needs more than a minute
ANSWER_S = 60.0  # maximum time of an answer about the state of a process
_NO_SHEDDING = {
    "HEADRACE_ROUTER_SHED_AFTER_S": "3600",
    "HEADRACE_ROUTER_MAX_WAIT_S": "3600",
    "HEADRACE_GATEWAY_QUEUE_WAIT_S": "3600",
}
_PATIENT = {
    "HEADRACE_GATEWAY_PING_TIMEOUT_S": "30",
    "HEADRACE_DECODE_PING_TIMEOUT_S": "30",
    "HEADRACE_GATEWAY_CONNECT_TIMEOUT_S": "60",
    "HEADRACE_DECODE_HANDSHAKE_S": "60",
    "HEADRACE_DECODE_READ_TIMEOUT_S": "60",
}
_UNHANDLED = ("was never retrieved", "was destroyed but it is pending", "was never awaited")
"""Texts of Python's reports about errors and tasks that no code handles."""
START_S = 900.0  # the very first start factorizes a model and calibrates the codec


@dataclass(frozen=True)
class Running:
    """A deployment that is ready.

    Attributes:
        url: base URL of the gateway's HTTP server.
        grpc_target: host and port of the gateway's gRPC server.
        port: HTTP port of the gateway.
        model: name of the served model.
    """

    url: str
    grpc_target: str
    port: int
    model: str

    @property
    def state(self) -> Deployment:
        """Ports and process ids, as `headrace up` last saved them."""
        found = Deployment.find(self.port)
        if found is None:
            raise RuntimeError("the deployment has ended")
        return found

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return Deployment.logs(self.port)

    def stub(self) -> InferenceStub:
        """Return a client of the gateway's gRPC server."""
        return InferenceStub(grpc.insecure_channel(self.grpc_target))

    def records(self, process: str, event: str) -> list[dict[str, object]]:
        """Return the log records of one process that have this event."""
        text = (self.logs / f"{process}.log").read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()  # without a line being written
        parsed = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in parsed if record.get("event") == event]

    def rank_pids(self, worker: str) -> list[int]:
        """Return the process ids of a worker's ranks, the first one first."""
        pids = self.records(worker, "ready")[-1]["pids"]
        assert isinstance(pids, list)
        return pids

    def metric(self, process: str, name: str, **labels: str) -> float:
        """Return a metric of one worker, summed over all labels that are not given."""
        port = self.records(process, "ready")[-1]["metrics_port"]
        return _read_metric(self._metrics_url(port), name, labels)

    def gateway_metric(self, name: str, **labels: str) -> float:
        """Return a metric of the gateway, summed over all labels that are not given."""
        return _read_metric(f"{self.url}/metrics", name, labels)

    def metrics_urls(self) -> dict[str, str]:
        """Return the metrics URL of the gateway and of each worker, by process name."""
        urls = {"gateway": f"{self.url}/metrics"}
        for name in sorted(self.state.pids):
            if name.startswith(("prefill", "decode", "encoder")):
                port = self.records(name, "ready")[-1]["metrics_port"]
                urls[name] = self._metrics_url(port)
        return urls

    def _metrics_url(self, port: object) -> str:
        return f"http://:{self.state.cluster_token}@127.0.0.1:{port}/metrics"

    def workers(self, router: int = 0) -> dict[str, dict[str, object]]:
        """Return a router's view of each worker, by worker id."""
        with self.state.router_client(router) as client:
            answer = client.get("/v1/workers", timeout=ANSWER_S)
        return {worker["worker_id"]: worker for worker in answer.json()["workers"]}

    def wait_for_all_workers(self, limit_s: float = RESTART_S) -> None:
        """Wait until the router knows every worker; the gateway is ready with the first pair.

        Raises:
            RuntimeError: if a worker is not ready in time.
        """
        deadline = time.monotonic() + limit_s
        expected = {name for name in self.state.pids if name.startswith(("prefill", "decode"))}
        while missing := expected - self._ready_workers():
            if time.monotonic() > deadline:
                raise RuntimeError(f"workers are not ready: {', '.join(sorted(missing))}")
            time.sleep(0.2)

    def wait_for_new_epoch(self, worker: str, old_epoch: object, state: str = "ready") -> None:
        """Wait until the router knows a new process of a worker, in a given state.

        Raises:
            AssertionError: if it is not in that state after `RESTART_S`.
        """
        deadline = time.monotonic() + RESTART_S
        while time.monotonic() < deadline:
            known = self.workers().get(worker)
            if known and known["epoch"] != old_epoch and known["state"] == state:
                return
            time.sleep(0.2)
        raise AssertionError(f"{worker} did not become {state}: {self.workers()}")

    def _ready_workers(self) -> set[str]:
        return {name for name, worker in self.workers().items() if worker["state"] == "ready"}

    def wait_until_idle(self, limit_s: float = 90.0) -> None:
        """Wait until no worker has requests or pages in use."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if all(map(_is_idle, self.workers().values())):
                time.sleep(0.6)  # one more heartbeat, so that all values are current
                return
            time.sleep(0.1)
        raise AssertionError(f"not idle after {limit_s} s: {self.workers()}")

    def pages_free(self) -> dict[str, object]:
        """Return the number of free KV pages of each worker."""
        return {name: worker["pages_free"] for name, worker in self.workers().items()}

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of each process."""
        pids = self.state.pids
        return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}

    def check_listeners(self) -> None:
        """Check that every process listens on loopback addresses only, TCP and UDP.

        Raises:
            AssertionError: if a process listens elsewhere, or if a service does not listen.
        """
        state = self.state
        pids = {name: [pid] for name, pid in state.pids.items()}
        pids |= {worker: self.rank_pids(worker) for worker in self.workers()}
        pids["supervisor"] = [state.supervisor_pid]
        listeners = [
            entry for name, each in pids.items() for pid in each for entry in _listeners(name, pid)
        ]
        assert {name for name, _, _ in listeners} >= set(state.pids), listeners
        outside = [entry for entry in listeners if not is_loopback(entry[1])]
        assert not outside, f"listening outside 127.0.0.1: {outside}"


def _is_idle(worker: dict[str, object]) -> bool:
    busy = ("running", "waiting", "queue_tokens", "promised_tokens")
    has_free_pages = worker["pages_free"] == worker["pages_total"]
    return has_free_pages and not any(worker[figure] for figure in busy)


def _read_metric(url: str, name: str, labels: dict[str, str]) -> float:
    text = httpx.get(url, trust_env=False, timeout=ANSWER_S).raise_for_status().text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def _listeners(name: str, pid: int) -> list[tuple[str, str, int]]:
    """Return (name, address, port) of each TCP listener and each unconnected UDP socket."""
    return [
        (name, connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.laddr and not connection.raddr
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    ]


@contextmanager
def deployed(
    *flags: str,
    environment: dict[str, str] | None = None,
    api_key: str = "none",
    start_s: float = START_S,
    logs: Path | None = None,
    sheds: bool = False,
    patient: bool = True,
) -> Iterator[Running]:
    """Run ``headrace up <flags>`` on free ports until the block ends.

    Args:
        flags: further flags of `headrace up`.
        environment: variables added to those of this process.
        api_key: key for the request that asks for the model's name.
        start_s: time limit for the start, in seconds.
        logs: folder to which the logs of all processes are copied at the end.
        sheds: whether the router refuses requests that would wait long, as it does by default. The
            requests of many tests would be too many for a slow machine.
        patient: whether workers have 30 s to answer pings, and a minute for connections and READs,
            instead of the defaults. On a busy machine, threads may wait for seconds. Tests that
            stop workers or cut links set it to False.

    Raises:
        RuntimeError: if the deployment is not ready in time, or leaves processes behind.
    """
    port, grpc_port, router_port, _ = free_ports(4)  # a second router has the last one
    command = [
        *(sys.executable, "-m", "services.cli", "up"),
        *("--port", str(port), "--grpc-port", str(grpc_port), "--router-port", str(router_port)),
        *flags,
    ]
    url = f"http://127.0.0.1:{port}"
    variables = dict(os.environ)
    variables |= {} if sheds else _NO_SHEDDING
    variables |= _PATIENT if patient else {}
    variables |= environment or {}
    with tempfile.TemporaryFile("w+") as log:  # a pipe that is not read would fill up
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
        try:
            model = _wait_until_ready(process, log, url, api_key, start_s)
            yield Running(url, f"127.0.0.1:{grpc_port}", port, model)
        finally:
            try:
                _stop(process)
            finally:
                if logs is not None:
                    _copy_logs(Deployment.logs(port), log, logs)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop `headrace up`.

    Raises:
        RuntimeError: if it leaves processes behind. They are killed.
    """
    children = _children(process)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    finally:
        left = [child for child in children if is_running(child)]
        for child in left:
            child.kill()
    if left:
        raise RuntimeError(f"`headrace up` left processes behind: {left}")


def _copy_logs(source: Path, log: IO[str], logs: Path) -> None:
    """Copy the logs of the services, and write that of `headrace up` beside them."""
    log.seek(0)
    (logs / "up.log").write_text(log.read())
    for file in source.glob("*.log"):
        shutil.copy(file, logs)


def unhandled_errors(logs: Path) -> list[str]:
    """Return the lines about errors and tasks that no code handles, from the logs in a folder."""
    return [
        f"{path.name}: {line[:400]}"
        for path in sorted(logs.glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if any(text in line for text in _UNHANDLED)
    ]


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", log: IO[str], url: str, api_key: str, start_s: float
) -> str:
    """Wait until the gateway is ready and return the name of its model."""
    headers = {"authorization": f"Bearer {api_key}"}
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            raise RuntimeError(f"`headrace up` ended: {log.read()}")
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == httpx.codes.OK:
                models = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).json()
                return str(models["data"][0]["id"])
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError("`headrace up` was not ready in time")


def _children(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
