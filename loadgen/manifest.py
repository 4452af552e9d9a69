"""Manifest of a run: everything needed to reproduce it."""

import os
import platform
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_URL_CREDENTIALS = re.compile(r"//[^/@\s]+@")
_PACKAGES = ("headrace", "aiohttp", "grpcio", "uvloop", "numpy")


def manifest(target: str, model: str, seed: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the manifest: versions, machine, time, and the arguments of the run.

    Args:
        target: the target's name, without credentials.
        arguments: command-line arguments; API keys and passwords in URLs are masked.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": target,
        "model": model,
        "seed": seed,
        "arguments": _masked(arguments),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _masked(arguments: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for argument in arguments:
        if shown and shown[-1] == "--api-key":
            argument = "…"
        elif argument.startswith("--api-key="):
            argument = "--api-key=…"
        shown.append(_URL_CREDENTIALS.sub("//…@", argument))
    return shown


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
