"""The router process: HTTP server, signals and shutdown."""

import asyncio
import logging
import signal

import structlog
from hypercorn.asyncio import serve as serve_http
from hypercorn.config import Config, Sockets

from services.common.collector import freeze_loaded
from services.common.errors import SettingsError
from services.router.app import build_dispatcher, create_app
from services.router.settings import RouterSettings

log = structlog.get_logger()

KEEP_ALIVE_S = 75.0  # longer than that of clients, so that the client closes idle connections
GRACE_S = 3.0  # time to send the last responses, after queued calls were refused


class _Bound(Config):
    """Hypercorn configuration that binds its sockets on creation, to detect a used port early."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self.bind = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
        self.accesslog = None
        self.errorlog = logging.getLogger("hypercorn.error")
        self.keep_alive_timeout = KEEP_ALIVE_S
        self.graceful_timeout = GRACE_S
        self._bound = super().create_sockets()

    @property
    def port(self) -> int:
        return int(self._bound.insecure_sockets[0].getsockname()[1])

    def create_sockets(self) -> Sockets:
        return self._bound


async def serve(settings: RouterSettings) -> None:
    """Run a router until SIGTERM or SIGINT, then refuse the queued place calls.

    Raises:
        SettingsError: if the address is invalid or the port is in use.
    """
    dispatcher = build_dispatcher(settings)
    app = create_app(settings, dispatcher)
    try:
        config = _Bound(settings.host, settings.port)
    except OSError as error:
        raise SettingsError(f"cannot listen on {settings.host}:{settings.port}: {error}") from None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    async def until_stopped() -> None:
        await stop.wait()
        log.info("stopping", waiting=len(dispatcher.queue))
        dispatcher.close()

    freeze_loaded()
    log.info("ready", host=settings.host, port=config.port, policy=settings.policy.value)
    await serve_http(app, config, shutdown_trigger=until_stopped)
