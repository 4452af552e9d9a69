"""State file of a running deployment, through which `down` and `status` find it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import httpx
import psutil

from services.common.addresses import bracketed
from services.common.cache import cache_dir
from services.common.errors import SettingsError
from services.common.file_errors import naming
from services.common.tls import MutualTls, TlsFiles
from services.local.lock import LockHeld, ProcessIdentity, holder_of, locked

STATE_VERSION = 2
"""Format version of ``state.json``. Increment it when a field is removed or redefined."""
EXIT_RUNNING = 3
"""Exit code of `headrace up` if a deployment already runs on the port."""


class DeploymentRunning(SettingsError):
    """A deployment with this gateway port is already running."""

    def __init__(self, port: int, supervisor: ProcessIdentity | None) -> None:
        process = f" (process {supervisor.pid})" if supervisor else ""
        super().__init__(
            f"a deployment already runs on port {port}{process}; "
            f"stop it with `headrace down --port {port}`, or choose another --port"
        )


class StateUnreadable(SettingsError):
    """A deployment runs, but this version cannot read its ``state.json``."""

    def __init__(self, path: Path, reason: str, supervisor: ProcessIdentity) -> None:
        super().__init__(
            f"cannot read {path}: {reason}. Another version of Headrace may have written it. "
            f"Stop that deployment with the version that started it, or with "
            f"`kill {supervisor.pid}`"
        )


@dataclass(frozen=True)
class Deployment:
    """A running deployment, identified by the HTTP port of its gateway.

    Attributes:
        host: address on which all processes listen.
        port: HTTP port of the gateway.
        grpc_port: gRPC port of the gateway.
        router_port: HTTP port of the first router.
        supervisor_pid: process id of `headrace up`.
        supervisor_started: start time of that process, seconds since the boot of the machine.
        cluster_token: shared secret between the services; empty with mutual TLS.
        pids: process id of each service process, by name.
        routers: number of routers; further ones use the ports after ``router_port``.
        tls_dir: folder with the certificate, key and CA of mutual TLS, or None.
        model: name of the served model; empty if an earlier version wrote the state.
        kv_format: KV format of the workers; empty if an earlier version wrote the state.
        encoder: name of the served encoder; empty for none.
        stop_s: maximum time in seconds to stop the deployment.
    """

    host: str
    port: int
    grpc_port: int
    router_port: int
    supervisor_pid: int
    supervisor_started: float
    cluster_token: str
    pids: dict[str, int]
    routers: int = 1
    tls_dir: str | None = None
    model: str = ""
    kv_format: str = ""
    encoder: str = ""
    stop_s: float = 90.0

    @staticmethod
    def folder(port: int) -> Path:
        """Return the folder of the state, the lock and the logs of the deployment on this port."""
        return _runs() / str(port)

    @classmethod
    def logs(cls, port: int) -> Path:
        """Return the folder of the processes' logs."""
        return cls.folder(port) / "logs"

    @classmethod
    def find(cls, port: int) -> "Deployment | None":
        """Return the deployment on this port, or None if none runs.

        Raises:
            StateUnreadable: if a deployment runs, but this version cannot read its state.
        """
        path = cls.folder(port) / "state.json"
        try:
            state = _read(path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            if holder := lock_holder(port):
                raise StateUnreadable(path, str(error), holder) from None
            return None
        supervisor = _supervisor(state) or lock_holder(port)
        if supervisor is None or not supervisor.alive:
            return None
        try:
            return cls._parse(state)
        except ValueError as error:
            raise StateUnreadable(path, str(error), supervisor) from None

    @classmethod
    def _parse(cls, state: dict[str, Any]) -> "Deployment":
        """Convert the content of a state file.

        Raises:
            ValueError: if the version differs, or a field is missing or has another type.
        """
        version = state.get("version", 1)  # absent before the field was introduced
        if version != STATE_VERSION:
            raise ValueError(f"its format version is {version}, not {STATE_VERSION}")
        for name, kind in _FIELDS.items():
            if not isinstance(state.get(name), kind):
                raise ValueError(f"its field {name} is {state.get(name)!r}")
        return cls(
            **{name: state[name] for name in _FIELDS if name in state}
        )  # later fields have defaults

    def router_client(self, number: int = 0) -> httpx.Client:
        """Return a client of a router, with the authentication of the services.

        Raises:
            SettingsError: if the files of mutual TLS cannot be used.
        """
        address = f"{bracketed(self.host)}:{self.router_port + number}"
        if self.tls_dir is None:
            headers = {"authorization": f"Bearer {self.cluster_token}"}
            return httpx.Client(base_url=f"http://{address}", headers=headers, trust_env=False)
        tls = MutualTls(TlsFiles.of(Path(self.tls_dir)))
        return httpx.Client(
            base_url=f"https://{address}", verify=tls.client_context, trust_env=False
        )

    @property
    def supervisor(self) -> ProcessIdentity:
        """The process of `headrace up`."""
        return ProcessIdentity(self.supervisor_pid, self.supervisor_started)

    def save(self) -> None:
        """Replace the state file atomically.

        Only its owner may read it, because it contains the cluster token.

        Raises:
            OSError: if it cannot be written; the last state is kept.
        """
        folder = self.folder(self.port)
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"state.json.{os.getpid()}"
        try:
            draft.touch(mode=0o600)
            with naming(draft):
                draft.write_text(json.dumps({"version": STATE_VERSION, **asdict(self)}, indent=1))
            draft.replace(folder / "state.json")
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def forget(cls, port: int) -> None:
        """Remove the state of a deployment that has ended; its logs stay."""
        (cls.folder(port) / "state.json").unlink(missing_ok=True)


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "host": str,
    "port": int,
    "grpc_port": int,
    "router_port": int,
    "supervisor_pid": int,
    "supervisor_started": (int, float),
    "cluster_token": str,
    "pids": dict,
    "tls_dir": (str, NoneType),
    "routers": (int, NoneType),
    "model": (str, NoneType),
    "kv_format": (str, NoneType),
    "encoder": (str, NoneType),
    "stop_s": (int, float, NoneType),
}


@contextmanager
def exclusive_port(port: int) -> Iterator[None]:
    """Hold the lock of a gateway port for the life of a deployment.

    Raises:
        DeploymentRunning: if a deployment with this port is running or starting.
        StateUnreadable: if a deployment runs, but this version cannot read its state.
    """
    try:
        with locked(_lock_file(port)):
            if found := Deployment.find(port):  # started by a version without locks
                raise DeploymentRunning(port, found.supervisor)
            yield
    except LockHeld as held:
        raise DeploymentRunning(port, held.holder) from None


def ports_in_use() -> list[int]:
    """Return the gateway ports of all deployments that run or start, in ascending order."""
    folders = _runs().iterdir() if _runs().is_dir() else ()
    ports = sorted(int(folder.name) for folder in folders if folder.name.isdecimal())
    return [port for port in ports if _runs_on(port)]


def _runs_on(port: int) -> bool:
    try:
        return lock_holder(port) is not None or Deployment.find(port) is not None
    except StateUnreadable:  # a deployment of another version runs
        return True


def lock_holder(port: int) -> ProcessIdentity | None:
    """Return the other process that holds this port's lock, or None."""
    holder = holder_of(_lock_file(port))
    return None if holder is None or holder.pid == os.getpid() else holder


def _runs() -> Path:
    return cache_dir() / "run"


def _lock_file(port: int) -> Path:
    return Deployment.folder(port) / "lock"


def _read(path: Path) -> dict[str, Any]:
    state = json.loads(path.read_text())
    if not isinstance(state, dict):
        raise ValueError("it is not a JSON object")
    return state


def _supervisor(state: dict[str, Any]) -> ProcessIdentity | None:
    pid, started = state.get("supervisor_pid"), state.get("supervisor_started")
    if not isinstance(pid, int) or not isinstance(started, int | float):
        return None
    if state.get("version", 1) == 1:  # `started` is in seconds since 1970
        with suppress(psutil.NoSuchProcess):
            if abs(psutil.Process(pid).create_time() - started) < 1.0:
                return ProcessIdentity.of(pid)
        return None
    return ProcessIdentity(pid, started)
