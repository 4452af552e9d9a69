"""The folder of files that Headrace makes or downloads."""

import os
from pathlib import Path

from services.common.errors import SettingsError


def cache_dir() -> Path:
    """Return ``HEADRACE_CACHE`` if it is set, else ``headrace`` in the user's cache folder.

    Raises:
        SettingsError: if the user has no home folder, as in some containers.
    """
    given = os.environ.get("HEADRACE_CACHE")
    if given:
        return Path(given)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "headrace"
    try:
        return Path.home() / ".cache" / "headrace"
    except RuntimeError as error:
        raise SettingsError(
            "this user has no home folder: set HEADRACE_CACHE to a folder"
        ) from error
