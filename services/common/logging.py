"""Structured logging, as JSON or as readable lines, with the request id."""

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, Processor


def configure_logging(service: str, *, format: str = "auto", level: str = "info") -> None:
    """Send the logs of structlog and of the standard library to stderr in one format.

    Args:
        service: name that each line contains.
        format: ``json``, ``human``, or ``auto`` (human on a terminal).
        level: lowest level that is logged.
    """
    as_json = format == "json" or (format == "auto" and not sys.stderr.isatty())

    def name_service(_logger: Any, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

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
    handler = logging.StreamHandler(sys.stderr)
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
