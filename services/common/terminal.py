"""Output of commands: results on stdout, progress and diagnostics on stderr."""

import sys

from rich.console import Console

_UNWRAPPED = 10_000
"""Width in columns at which no line is wrapped."""


def results() -> Console:
    """Return a console for the result of a command, on stdout.

    If stdout is not a terminal, rows of tables are not wrapped, so that `grep` and similar programs
    see a row as one line.
    """
    width = None if sys.stdout.isatty() else _UNWRAPPED
    return Console(highlight=False, width=width)


def diagnostics() -> Console:
    """Return a console for progress, warnings and errors, on stderr."""
    return Console(stderr=True, highlight=False, soft_wrap=True)
