"""Command lines of child processes that run Python."""

import sys


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter.

    With ``-P``, modules are not imported from the current folder. Otherwise ``-m`` and ``-c`` would
    run a file such as typer.py that a user has there, in place of the installed package.
    """
    return [sys.executable, "-P", *arguments]


def headrace_command(*arguments: str) -> list[str]:
    """Return the command that runs ``headrace`` in this interpreter."""
    return python_command("-m", "services.cli", *arguments)
