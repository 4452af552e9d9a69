"""Warm-up of a worker's engine before it is ready: kernel compilation and graph capture."""

import time
from collections.abc import Callable

import structlog

from runtime.engine import Engine
from services.worker.self_test import check_logits

log = structlog.get_logger()


def warm_up(engine: Engine) -> None:
    """Warm up all ranks, and log how long each part took; on a CPU, compute a test prompt only.

    Raises:
        NotFinite: the model's weights or the device are damaged.
    """
    if engine.executor.device.type != "cpu":
        engine.warm_up(progress_log())
    check_logits(engine)


def progress_log() -> Callable[[str, int], None]:
    """Return a callback that logs a finished stage and the time since the previous one."""
    since = time.perf_counter()

    def progress(stage: str, size: int) -> None:
        nonlocal since
        now = time.perf_counter()
        log.info("warmed up", stage=stage, size=size, ms=round(1e3 * (now - since)))
        since = now

    return progress
