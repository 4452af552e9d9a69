"""The folder of files that Headrace makes or downloads."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return ``HEADRACE_CACHE`` if it is set, else ``headrace`` in the user's cache folder."""
    given = os.environ.get("HEADRACE_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace"
