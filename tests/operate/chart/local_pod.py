"""Runs the container of a rendered pod as a local process, with its arguments and environment.

Only hosts, ports and mount paths change. A process has no variables besides those of its container
and the few of Python's installation.
"""

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from tests.operate.chart.manifests import Manifest, main_container
from tests.ports import free_ports

PATIENCE_S = 180.0
"""Least time that a probe has to succeed, seconds: a busy machine is slower than a cluster."""

_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass
class Cluster:
    """Folders, secrets and addresses that the pods of a test have in common.

    Attributes:
        folder: folder for mounts and logs.
        secrets: data of Secrets, by name and key.
        models: folder that is mounted at /models.
        transfer_ports: ports of KV transfers, in place of those of the pods.
        routers: local HTTP port of each router, by the name of its pod.
    """

    folder: Path
    secrets: dict[str, dict[str, str]]
    models: Path
    transfer_ports: str
    routers: dict[str, int] = field(default_factory=dict)

    def secret_folder(self, name: str) -> Path:
        """Return a folder with the files of a Secret, as it is mounted."""
        folder = self.folder / "secrets" / name
        folder.mkdir(parents=True, exist_ok=True)
        for key, value in self.secrets[name].items():
            (folder / key).write_text(value)
        return folder

    def router_url(self, url: str) -> str:
        """Return the local URL of a router's URL in the cluster."""
        scheme, _, rest = url.partition("://")
        return f"{scheme}://127.0.0.1:{self.routers[rest.partition('.')[0]]}"


class LocalPod:
    """One pod of a role as a process on loopback.

    Args:
        pod: rendered pod, with `metadata` and `spec`.
        name: name of the pod.
    """

    def __init__(self, cluster: Cluster, pod: Manifest, name: str) -> None:
        self._cluster = cluster
        self.name = name
        self.spec = pod["spec"]
        self.container = main_container(pod)
        ports = self.container["ports"]
        self.ports = {
            port["name"]: (port["containerPort"], local)
            for port, local in zip(ports, free_ports(len(ports)), strict=True)
        }
        self.log = cluster.folder / f"{name}.log"
        self._output: IO[bytes] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def port(self, name: str) -> int:
        """Return the local port of a named container port."""
        return self.ports[name][1]

    def start(self) -> "LocalPod":
        """Start the process, again if it has ended."""
        self.kill()
        self._output = self.log.open("wb")
        command, *rest = self.container["command"]
        programs = {"headrace": [sys.executable, "-m", "services.cli"]}
        self.process = subprocess.Popen(
            [*programs[command], *rest, *self.container["args"]],
            env=self.environment(),
            cwd=self._cluster.folder,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        return self

    def environment(self) -> dict[str, str]:
        """Return the environment with local hosts, ports and paths."""
        mounts = self._mounts()
        numbers = {str(inside): str(outside) for inside, outside in self.ports.values()}
        found = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        for entry in self.container["env"]:
            name = entry["name"]
            value = self._value(entry)
            if name.endswith("_ROUTERS"):
                value = json.dumps([self._cluster.router_url(url) for url in json.loads(value)])
            elif name.endswith("_HOST"):
                value = "127.0.0.1"
            elif name.endswith("_PORT"):
                value = numbers[value]
            elif name.endswith("_TRANSFER_INTERFACE"):
                value = "lo"
            elif name.endswith("_TRANSFER_PORTS"):
                value = self._cluster.transfer_ports
            for inside, outside in mounts.items():
                if value == inside or value.startswith(inside + "/"):
                    value = str(outside) + value.removeprefix(inside)
            found[name] = value
        return found

    def _value(self, entry: Manifest) -> str:
        source = entry.get("valueFrom")
        if source is None:
            return str(entry["value"])
        if reference := source.get("secretKeyRef"):
            data, key = self._cluster.secrets[reference["name"]], reference["key"]
            return data.get(key, "") if reference.get("optional") else data[key]
        if resource := source.get("resourceFieldRef"):
            where, _, name = resource["resource"].partition(".")
            return str(self.container["resources"][where][name])
        fields = {"metadata.name": self.name, "status.podIP": "127.0.0.1"}
        return fields[source["fieldRef"]["fieldPath"]]

    def _mounts(self) -> dict[str, Path]:
        """Return local folders by mount path."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        found = {}
        for mount in self.container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "secret" in volume:
                folder = self._cluster.secret_folder(volume["secret"]["secretName"])
            elif mount["name"] == "models":
                folder = self._cluster.models
            else:
                folder = self._cluster.folder / self.name / mount["name"]
                folder.mkdir(parents=True, exist_ok=True)
            found[mount["mountPath"]] = folder
        return found

    def probe(self, kind: str) -> tuple[int, str]:
        """Return status and body of a probe as a kubelet sends it; status 0 without connection."""
        get = self.container[kind]["httpGet"]
        timeout = self.container[kind].get("timeoutSeconds", 1)
        return request(self.port(get["port"]), get["path"], timeout_s=timeout)

    def wait_for(self, kind: str) -> str:
        """Wait until a probe succeeds, and return its body.

        It may take as long as its thresholds allow, but at least `PATIENCE_S`.

        Raises:
            TimeoutError: with the last answer and the end of the log.
        """
        probe = self.container[kind]
        deadline = time.monotonic() + max(
            PATIENCE_S, probe["periodSeconds"] * probe["failureThreshold"]
        )
        answer = (0, "")
        while time.monotonic() < deadline and self.running():
            answer = self.probe(kind)
            if answer[0] == 200:
                return answer[1]
            time.sleep(0.2)
        raise TimeoutError(f"{self.name}: {kind}: {answer}\n{self.log.read_text()[-3000:]}")

    def memory(self) -> int:
        """Return the resident memory of the process, bytes."""
        assert self.process is not None
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def memory_limit(self) -> int:
        """Return the memory limit of the container, bytes."""
        limit = self.container["resources"]["limits"]["memory"]
        return int(limit[:-2]) << {"Mi": 20, "Gi": 30}[limit[-2:]]

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def terminate(self) -> None:
        """Send SIGTERM, as a kubelet does after the preStop hook."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Return the exit status.

        Raises:
            subprocess.TimeoutExpired: if the process outlives the pod's grace period.
        """
        assert self.process is not None
        return self.process.wait(self.spec["terminationGracePeriodSeconds"])

    def kill(self) -> None:
        """End the process, if it still runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self._output is not None:
            self._output.close()


def request(
    port: int,
    path: str,
    *,
    headers: dict[str, str] | None = None,
    tls: tuple[ssl.SSLContext, str] | None = None,
    timeout_s: float = 10.0,
) -> tuple[int, str]:
    """Return status and body of a GET request; status 0 if there is no answer.

    Args:
        tls: context and name of the server's certificate, or None for plain HTTP.
    """
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as plain:
            wrapped = tls[0].wrap_socket(plain, server_hostname=tls[1]) if tls else plain
            with wrapped as connection:
                client = http.client.HTTPConnection("127.0.0.1", port)
                client.sock = connection
                client.request("GET", path, headers=headers or {})
                response = client.getresponse()
                return response.status, response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
