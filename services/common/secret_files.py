"""Files with secrets that a service reads again while it runs: API keys, certificates."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import structlog

from services.common.signals import handle_sighup

log = structlog.get_logger()

PERIOD_S = 1.0
"""Time between two reads of the files, seconds."""


class SecretFiles(Protocol):
    """Files of one kind. Unusable content is reported, and the previous content stays in use."""

    @property
    def kind(self) -> str:
        """Name in logs and metrics."""

    @property
    def failure(self) -> str | None:
        """Reason for which the current content is not used; None if it is used."""

    @property
    def loaded_at(self) -> float:
        """Time at which the used content was read, seconds since 1970."""

    @property
    def expires_at(self) -> float | None:
        """Time at which the used content becomes invalid, seconds since 1970; None for never."""

    def refresh(self, *, at_once: bool = False) -> None:
        """Read the files, and use their content if it has changed and is valid.

        Thread-safe.

        Args:
            at_once: whether to use new content even if a later call would otherwise confirm it
                first, and to report unusable content again.
        """


@asynccontextmanager
async def reloading(files: Sequence[SecretFiles]) -> AsyncIterator[None]:
    """Use new content of the files during the ``async with`` block, and at once after SIGHUP.

    After the block, SIGHUP has no effect.
    """
    hung_up = asyncio.Event()
    handle_sighup(hung_up.set)
    task = asyncio.create_task(_reload(files, hung_up))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _reload(files: Sequence[SecretFiles], hung_up: asyncio.Event) -> None:
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S if files else None):
                await hung_up.wait()
        at_once = hung_up.is_set()
        hung_up.clear()
        if at_once:
            log.info("SIGHUP: reading files again", files=[each.kind for each in files])
        for each in files:
            try:
                await asyncio.to_thread(each.refresh, at_once=at_once)
            except Exception:
                log.exception("reading files again failed", files=each.kind)
