"""The limit on open files, which bounds the connections of a process."""

import resource
from contextlib import suppress

import structlog

log = structlog.get_logger()

_MOST = 1 << 20
"""Largest limit that is set: the kernel's default bound (fs.nr_open), and the bound of
``max_connections``."""
_RESERVE = 256
"""Number of files that a process needs besides the connections of clients."""


def raise_file_limit() -> None:
    """Raise the soft limit of this process to its hard limit.

    Many systems have a soft limit of 1,024, for the sake of programs that call ``select``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < target:
        with suppress(ValueError, OSError):  # forbidden by a security policy, for example
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def check_file_limit(connections: int) -> None:
    """Log a warning if the limit does not allow this number of connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < connections + _RESERVE:
        log.warning(
            "the limit on open files is too low (ulimit -Hn)", limit=soft, connections=connections
        )
