"""Where a local deployment keeps what `down` and `status` need to find it again."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


def cache_dir() -> Path:
    """For artifacts that can be made again: ``HEADRACE_CACHE``, else the user's cache folder."""
    given = os.environ.get("HEADRACE_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace"


@dataclass(frozen=True)
class Deployment:
    """One running `headrace up`, found by its gateway's port."""

    host: str
    port: int
    grpc_port: int
    router_port: int
    supervisor_pid: int
    supervisor_started: float  # tells a reused pid from the supervisor's
    cluster_token: str
    pids: dict[str, int]

    @staticmethod
    def folder(port: int) -> Path:
        """State and logs of the deployment whose gateway has this port."""
        return cache_dir() / "run" / str(port)

    @classmethod
    def find(cls, port: int) -> "Deployment | None":
        """The deployment on this port, if its supervisor lives."""
        try:
            fields = json.loads((cls.folder(port) / "state.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        deployment = cls(**fields)
        return deployment if deployment.alive else None

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.supervisor_pid)
            return abs(process.create_time() - self.supervisor_started) < 1.0
        except psutil.NoSuchProcess:
            return False

    def save(self) -> None:
        """Replaces the state file in one move; only its owner may read the token in it."""
        folder = self.folder(self.port)
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"state.json.{os.getpid()}"
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(asdict(self), indent=1))
        draft.replace(folder / "state.json")

    @classmethod
    def forget(cls, port: int) -> None:
        """The deployment has ended; its logs stay."""
        (cls.folder(port) / "state.json").unlink(missing_ok=True)
