"""Records what must not happen in this process: exceptions that nothing handles, and growth."""

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import psutil
import structlog

_UNDECODED = "Exception deserializing message!"  # gRPC's clients log it, and return None


class Watch(logging.Handler):
    """Records errors in the logs, and exceptions that nothing handled.

    Attributes:
        faults: descriptions of them.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Record an error of the `logging` module; `asyncio` and gRPC report exceptions there.

        Loggers of structlog that were used before the watch began write there, too. As in `logged`,
        only their exceptions count: services log invalid messages as errors.
        """
        if record.getMessage() == _UNDECODED:
            return
        fails = record.levelno >= logging.ERROR and not record.name.startswith("services.")
        if fails or record.exc_info:
            trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            self.faults.append(f"{record.name}: {record.getMessage()[:2000]} {trace[-3000:]}")

    def logged(self, _logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        """Record an exception that structlog reports, and drop every record."""
        if method == "exception" or event.get("exc_info"):
            self.faults.append(f"{event} {traceback.format_exc()[-3000:]}")
        raise structlog.DropEvent

    def in_loop(self, _loop: object, context: dict[str, Any]) -> None:
        """Record an exception that a task or callback did not handle."""
        error = context.get("exception")
        trace = "".join(traceback.format_exception(error)) if error else ""
        self.faults.append(f"{context} {trace[-3000:]}")


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch this process and its running event loop."""
    watch = Watch()
    loop = asyncio.get_running_loop()
    logging.getLogger().addHandler(watch)
    loop.set_exception_handler(watch.in_loop)
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda fault: watch.faults.append(f"unraisable: {fault}")
    threading.excepthook = lambda fault: watch.faults.append(f"thread: {fault}")
    configured = structlog.get_config()
    structlog.configure(
        processors=[watch.logged],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        cache_logger_on_first_use=False,
    )
    try:
        yield watch
    finally:
        structlog.configure(**configured)
        sys.unraisablehook, threading.excepthook = hooks
        loop.set_exception_handler(None)
        logging.getLogger().removeHandler(watch)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)
