"""Packages of the ``loadgen`` extra, which a plain installation of Headrace does not have."""

import sys
from importlib.util import find_spec

from loadgen.errors import UsageError

_PACKAGES = ("matplotlib", "scipy")


def require_extra() -> None:
    """Check that the packages of the ``loadgen`` extra are installed, without importing them.

    Raises:
        UsageError: if one is missing; the message says how to install it.
    """
    missing = [name for name in _PACKAGES if not _installed(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{', '.join(missing)} {verb} not installed; "
            f"run: {sys.executable} -m pip install 'headrace[loadgen]'"
        )


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # ValueError: an entry of sys.modules is None
        return False
