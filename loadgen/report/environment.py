"""Manifest as lines of text."""

import shlex
from contextlib import suppress
from datetime import datetime
from typing import Any

_FIRST = ("model", "target", "started", "seed")


def lines(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) pairs, the most important first."""
    order = sorted(manifest, key=lambda name: name not in _FIRST)
    return [(name.replace("_", " "), _text(name, manifest[name])) for name in order]


def subtitle(manifest: dict[str, Any]) -> str:
    """Return one line with model, target and start time, without those that are unknown."""
    known = [str(manifest[name]) for name in ("model", "target") if manifest.get(name)]
    with suppress(KeyError, ValueError, TypeError):
        known.append(f"{datetime.fromisoformat(manifest['started']):%Y-%m-%d %H:%M %Z}")
    return " · ".join(known)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name == "arguments":
        return shlex.join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(key, one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text("", one) for one in value)
    return str(value)
