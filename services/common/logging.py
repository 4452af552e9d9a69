"""Structured logging, as JSON or as readable lines, with the request id.

A line that cannot be written, for example on a full disk, is dropped and counted. Packages that do
not know the services report other failed writes by log records with the attribute `FAILED_WRITE`,
whose value is the use of the disk (`services.common.disk`).
"""

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

from services.common.disk import LOGS, count_failed_write

FAILED_WRITE = "failed_write"


class CountingHandler(logging.StreamHandler[Any]):
    """Writes records to stderr, and counts failed writes.

    A failed write may leave a part of a line. The next record begins a new one.
    """

    _is_cut = False

    def format(self, record: logging.LogRecord) -> str:
        start = self.terminator if self._is_cut else ""
        self._is_cut = False
        return start + super().format(record)

    def emit(self, record: logging.LogRecord) -> None:
        if use := getattr(record, FAILED_WRITE, None):
            count_failed_write(use)
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - named by logging
        if isinstance(sys.exception(), OSError):
            self._is_cut = True
            count_failed_write(LOGS)
        else:
            super().handleError(record)


def configure_logging(
    service: str, *, format: str = "auto", level: str = "info", rank: int | None = None
) -> None:
    """Send the logs of structlog and of the standard library to stderr in one format.

    Args:
        service: name that each line contains.
        format: ``json``, ``human``, or ``auto`` (human on a terminal).
        level: lowest level that is logged.
        rank: rank of a worker that each line contains; None for a service of one process, and for
            the first rank.
    """
    as_json = format == "json" or (format == "auto" and not sys.stderr.isatty())
    origin = {"service": service} if rank is None else {"service": service, "rank": rank}

    def name_service(_logger: Any, _method: str, event: EventDict) -> EventDict:
        return {**origin, **event}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_service,
    ]
    render: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = CountingHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
            foreign_pre_chain=shared,
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
