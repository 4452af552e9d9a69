"""Errors of the ``headrace`` commands: one line on stderr instead of a traceback, and an exit code.

A service reports only errors in its settings in this way. Its other errors are faults: their
traceback belongs in its log, and exit code 1 lets the supervisor restart it.
"""

import os
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from services.common.cache import cache_dir
from services.common.errors import SettingsError
from services.launch import SERVICES
from services.local.supervisor import EXIT_SETTINGS_ERROR

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells set it: 128 and the number of SIGINT."""


class Commands(TyperGroup):
    """The group of all commands, which reports their errors."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _print_error(ctx.invoked_subcommand, "interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            if not _is_expected(error, ctx.invoked_subcommand):
                raise
            _print_error(ctx.invoked_subcommand, describe(error))
            raise typer.Exit(EXIT_SETTINGS_ERROR) from None


def describe(error: Exception) -> str:
    """Return one line for an expected error.

    For a file in the cache, it says how to move the cache.
    """
    if not isinstance(error, OSError) or not isinstance(error.filename, str | bytes | os.PathLike):
        return " ".join(str(error).splitlines())
    path = Path(os.fsdecode(error.filename))
    line = f"{path}: {error.strerror}"
    if path.absolute().is_relative_to(cache_dir().absolute()):
        line += "; HEADRACE_CACHE sets another folder for the files of Headrace"
    return line


def _is_expected(error: Exception, command: str) -> bool:
    if isinstance(error, SettingsError):
        return True
    if command in SERVICES or isinstance(error, BrokenPipeError):
        return False
    from runtime.errors import RuntimeFault

    return isinstance(error, RuntimeFault | OSError)


def _print_error(command: str, message: str) -> None:
    print(f"headrace {command}: {message}", file=sys.stderr)  # noqa: T201
