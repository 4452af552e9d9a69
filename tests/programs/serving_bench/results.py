"""Results document: written after every row, so that an interrupted benchmark keeps its rows."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = "results.json"

_ROOT = Path(__file__).parents[3]
_PACKAGES = ("headrace", "torch", "triton", "nixl", "vllm", "sglang", "grpcio", "aiohttp")
_SETTINGS = re.compile(r"^(HEADRACE|UCX|NCCL|CUDA|OMP|TRITON|VLLM)_")
_SECRETS = re.compile("TOKEN|KEY|SECRET|PASSWORD")
_TIMEOUT_S = 10.0


class Results:
    """The document of one run of the benchmark.

    Args:
        file: file that `save` replaces.
        manifest: environment of the run, see `manifest`.
        baseline: name of the system with which ratios compare; None for the first.
    """

    def __init__(
        self, file: Path, manifest: Mapping[str, Any], baseline: str | None = None
    ) -> None:
        self.file = file
        self.document: dict[str, Any] = {
            "manifest": dict(manifest),
            "baseline": baseline,
            "systems": [],
            "stopped": False,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def add_system(self, name: str, description: Mapping[str, Any]) -> dict[str, Any]:
        """Append the entry of a system; the caller adds its figures."""
        entry = {"name": name, **description, "cases": {}}
        self.document["systems"].append(entry)
        return entry

    def save(self) -> None:
        """Replace the file atomically."""
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps(self.document, indent=1))
        draft.replace(self.file)


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """Return one document with the systems of several files.

    Each entry gets the manifest of its file. If a name occurs again, a number is added to it.

    Raises:
        OSError, ValueError, KeyError: if a file is not a results document.
    """
    documents = [json.loads(file.read_text()) for file in files]
    names: set[str] = set()
    systems = []
    for document in documents:
        for system in document["systems"]:
            name = system["name"]
            number = 2
            while system["name"] in names:
                system["name"], number = f"{name} ({number})", number + 1
            names.add(system["name"])
            systems.append(system | {"manifest": document["manifest"]})
    stopped = any(document["stopped"] for document in documents)
    return {"manifest": documents[0]["manifest"], "systems": systems, "stopped": stopped}


def manifest(arguments: Sequence[str], commit: str | None = None) -> dict[str, Any]:
    """Return the environment of a run: GPUs, versions, commit and settings.

    Args:
        commit: commit of a copy without a Git repository.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "-C", str(_ROOT), "rev-parse", "HEAD"),
        "gpus": _gpus(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if _SETTINGS.match(name) and not _SECRETS.search(name)
        },
        "arguments": list(arguments),
    }


def _gpus() -> list[str]:
    query = "--query-gpu=name,memory.total,driver_version"
    return (_output("nvidia-smi", query, "--format=csv,noheader") or "").splitlines()


def _output(*command: str) -> str | None:
    """Return what a command prints, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
