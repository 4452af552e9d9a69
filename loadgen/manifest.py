"""Where, when and how a run was made: what one needs to make it again."""

import os
import platform
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_IN_URL = re.compile(r"//[^/@\s]+@")
_PACKAGES = ("headrace", "aiohttp", "grpcio", "uvloop", "numpy")


def manifest(target: str, model: str, seed: int, arguments: Sequence[str]) -> dict[str, Any]:
    """``target`` without credentials, ``arguments`` as they were given, keys and passwords taken
    out."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": target,
        "model": model,
        "seed": seed,
        "arguments": _without_keys(arguments),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _without_keys(arguments: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for argument in arguments:
        if shown and shown[-1] == "--api-key":
            argument = "…"
        elif argument.startswith("--api-key="):
            argument = "--api-key=…"
        shown.append(_IN_URL.sub("//…@", argument))
    return shown


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
