"""The end of a process that threads or destructors may prevent."""

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

log = structlog.get_logger()

_at_once = threading.Event()


def end_at_once() -> None:
    """Let `ending` end this process without waiting for threads, and without destructors."""
    _at_once.set()


def end_within(limit_s: float) -> None:
    """End this process with exit code 1 after ``limit_s`` seconds, unless it has ended by then."""

    def end() -> None:
        log.error("not ended in time", limit_s=limit_s)
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()


@contextmanager
def ending() -> Iterator[None]:
    """End this process with the block, if `end_at_once` was called.

    Output and exit code are those of Python: 0, the code of ``SystemExit``, or 1 after the
    traceback of another exception.
    """
    code = 0
    try:
        yield
    except BaseException as error:
        if not _at_once.is_set():
            raise
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            code = error.code or 0
        else:
            traceback.print_exception(error)
            code = 1
    if _at_once.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
