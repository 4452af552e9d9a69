"""A deployment of single processes, which a test restarts with other variables, under load."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from services.local.artifacts import Artifacts
from services.local.options import UpOptions
from services.local.processes import plan_processes
from services.local.supervisor import ProcessSpec
from tests.ports import free_ports

START_S = 600.0  # maximum time until a process is ready
DRAIN_S = 120.0  # maximum time until a process has ended
_WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


class Processes:
    """Two routers, two gateways, two prefill and two decode workers.

    Args:
        folder: folder for the logs.
        model: checkpoint that is served.

    Attributes:
        names: names of all processes: routers, workers, gateways.
        urls: URLs of the gateways, by name.
    """

    names = ("router", "router-1", *_WORKERS, "gateway", "gateway-1")

    def __init__(self, folder: Path, model: Path) -> None:
        port, grpc_port, second_port, second_grpc_port, *routers = free_ports(6)
        self._router_ports = dict(zip(("router", "router-1"), routers, strict=True))
        options = UpOptions(
            port=port, grpc_port=grpc_port, router_port=routers[0], routers=2, prefill=2, decode=2
        )
        artifacts = Artifacts(model, model, None, "tiny")
        specs = {spec.name: spec for spec in plan_processes(options, artifacts, "")}
        other_ports = {str(port): str(second_port), str(grpc_port): str(second_grpc_port)}
        second = tuple(other_ports.get(one, one) for one in specs["gateway"].arguments)
        specs["gateway-1"] = replace(specs["gateway"], arguments=second)
        self.urls = {"gateway": _url(port), "gateway-1": _url(second_port)}
        self._specs: dict[str, ProcessSpec] = specs
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._variables: dict[str, dict[str, str]] = {}
        self._folder = folder
        self._http = httpx.Client(trust_env=False, timeout=5)

    def start(self, name: str, variables: dict[str, str]) -> None:
        """Start a process with additional variables."""
        spec = self._specs[name]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", "services.cli", spec.service, *spec.arguments],
                env={**os.environ, **spec.environment, **variables},
                stdout=log,
                stderr=log,
            )
        self._variables[name] = variables

    def stop(self, name: str) -> None:
        """Let a process drain and end, and check that it has ended in order."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DRAIN_S) == 0, name

    def hang_up(self) -> None:
        """Send SIGHUP to all processes."""
        for process in self._running.values():
            process.send_signal(signal.SIGHUP)

    def check_running(self) -> None:
        """Check that no process has ended."""
        ended = {name: p.returncode for name, p in self._running.items() if p.poll() is not None}
        assert not ended

    def wait_until_ready(self) -> None:
        """Wait until both routers know that all workers are ready, and both gateways are ready."""
        _wait(lambda: all(map(self._knows_all_workers, self._router_ports)), "workers")
        ready = [f"{url}/ready" for url in self.urls.values()]
        _wait(lambda: all(self._status(url) == 200 for url in ready), "gateways")

    def router_status(self, name: str, token: str) -> int:
        """Return the status of a call of a router with a token."""
        return self._status(f"{_url(self._router_ports[name])}/v1/workers", token)

    def kill(self) -> None:
        """Kill all processes."""
        self._http.close()
        for process in self._running.values():
            process.kill()
            process.wait()

    def _knows_all_workers(self, router: str) -> bool:
        self.check_running()
        headers = {"authorization": f"Bearer {self._variables[router]['HEADRACE_CLUSTER_TOKEN']}"}
        url = f"{_url(self._router_ports[router])}/v1/workers"
        try:
            answer = self._http.get(url, headers=headers)
        except httpx.HTTPError:
            return False
        workers = answer.raise_for_status().json()["workers"]
        return {w["worker_id"] for w in workers if w["state"] == "ready"} == {*_WORKERS}

    def _status(self, url: str, token: str = "") -> int:
        """Return the status of an answer; 0 if there is none."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        try:
            return self._http.get(url, headers=headers).status_code
        except httpx.HTTPError:
            return 0


class Load:
    """Requests that clients send to the gateways, one after the other.

    Attributes:
        statuses: number of responses with each status, or with each error of a connection.
    """

    def __init__(self, urls: dict[str, str]) -> None:
        self._urls = dict(urls)
        self._usable = set(urls)
        self._active: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._stopping = False
        self.statuses: Counter[int | str] = Counter()

    @contextmanager
    def running(self, clients: int) -> Iterator[None]:
        """Keep requests of some clients running in the block."""
        threads = [threading.Thread(target=self._keep_asking) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping = True
            for thread in threads:
                thread.join()

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Send no requests to a gateway in the block, like a load balancer during its restart.

        Processes that are not gateways get no requests anyway.
        """
        with self._changed:
            self._usable.discard(name)
            self._changed.wait_for(lambda: not self._active[name], timeout=DRAIN_S)
        yield
        with self._changed:
            self._usable |= {name} & self._urls.keys()

    def wait_for(self, responses: int) -> None:
        """Wait until this number of further responses have arrived."""
        wanted = self.statuses.total() + responses
        _wait(lambda: self.statuses.total() >= wanted, "responses")

    def _keep_asking(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 48, "ignore_eos": True}
        with httpx.Client(trust_env=False, timeout=DRAIN_S) as client:
            while not self._stopping:
                with self._changed:
                    gateway = random.choice(sorted(self._usable))
                    self._active[gateway] += 1
                try:
                    url = f"{self._urls[gateway]}/v1/completions"
                    status: int | str = client.post(url, json=body).status_code
                except httpx.HTTPError as error:
                    status = repr(error)
                with self._changed:
                    self._active[gateway] -= 1
                    self.statuses[status] += 1
                    self._changed.notify_all()


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} after {START_S:.0f} s"
        time.sleep(0.5)
