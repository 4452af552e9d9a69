"""A Prometheus server of a Debian package, with the configuration in ``deploy/prometheus``."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.expressions import DEPLOY
from tests.operate.debian import Unpacked
from tests.ports import free_port

SOURCE = DEPLOY / "prometheus"
_START_S = 60.0
_STOP_S = 30.0


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    client: httpx.Client

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an instant vector.

        Raises:
            AssertionError: if the expression is invalid, or its result is no vector.
        """
        answer = self.client.get("/api/v1/query", params={"query": expression})
        assert answer.status_code == httpx.codes.OK, f"{expression}: {answer.text}"
        data = answer.json()["data"]
        assert data["resultType"] == "vector", expression
        return list(data["result"])

    def values(self, expression: str) -> list[float]:
        """Return the values of an instant vector."""
        return [float(sample["value"][1]) for sample in self.query(expression)]

    def targets(self) -> list[dict[str, Any]]:
        """Return all targets, with their health and last error."""
        return list(self.get("targets", state="active")["activeTargets"])

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an API path."""
        return (
            self.client.get(f"/api/v1/{path}", params=parameters).raise_for_status().json()["data"]
        )


def configure(folder: Path, targets: Mapping[str, list[str]], token: str) -> Path:
    """Write the project's configuration with other addresses, and return its path.

    Args:
        folder: folder to write to.
        targets: addresses by component.
        token: cluster token.
    """
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
    (folder / "cluster-token").write_text(token)
    groups = yaml.safe_load((folder / "targets.yaml").read_text())
    listed = {group["labels"]["component"] for group in groups}
    for component in sorted(targets.keys() - listed):  # the encoder's is in a comment
        groups.append({"labels": {**groups[0]["labels"], "component": component}})
    for group in groups:
        group["targets"] = targets[group["labels"]["component"]]
    (folder / "targets.yaml").write_text(yaml.safe_dump(groups))
    config = folder / "prometheus.yml"
    content = yaml.safe_load(config.read_text())
    (scrape,) = content["scrape_configs"]
    scrape["authorization"]["credentials_file"] = "cluster-token"
    config.write_text(yaml.safe_dump(content))
    return config


@contextmanager
def serving(package: Unpacked, config: Path) -> Iterator[Prometheus]:
    """Run Prometheus until the block ends.

    Raises:
        RuntimeError: if it does not become ready.
    """
    port = free_port()
    log = config.with_suffix(".log")
    command = [
        str(package.program("prometheus")),
        f"--config.file={config}",
        f"--storage.tsdb.path={config.parent / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output, env=package.environment)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            _wait_until_ready(process, client, log)
            yield Prometheus(client)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        finally:
            process.kill()


def _wait_until_ready(process: "subprocess.Popen[bytes]", client: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.get("/-/ready").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"Prometheus is not ready: {log.read_text()[-4000:]}")
