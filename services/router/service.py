"""The router process: HTTP server, signals and shutdown."""

import asyncio
import signal
import time
from functools import partial

import structlog
import uvloop

from services.common.errors import SettingsError
from services.common.file_limit import check_file_limit
from services.common.http_server import HttpServer, listen
from services.common.memory import freeze_loaded
from services.common.metrics_server import OperationServers
from services.common.probes import Probes
from services.common.secret_files import reloading
from services.router.app import (
    build_dispatcher,
    build_encoder_dispatcher,
    create_app,
    failure,
    not_ready,
)
from services.router.server import http_config
from services.router.settings import RouterSettings

log = structlog.get_logger()

loop_factory = uvloop.new_event_loop


async def serve(settings: RouterSettings) -> None:
    """Run a router until SIGTERM or SIGINT, then refuse the queued placement requests.

    On SIGHUP, read certificates again at once.

    Raises:
        SettingsError: if the address or a TLS file is invalid, or the port is in use.
    """
    check_file_limit(settings.max_waiting + settings.max_workers)
    dispatcher = build_dispatcher(settings, time.monotonic())
    encoders = build_encoder_dispatcher(settings, time.monotonic())
    server = HttpServer(http_config(create_app(settings, dispatcher, encoders), settings.tls))
    listener = listen(settings.host, settings.port)
    try:
        probes = Probes(partial(not_ready, dispatcher), partial(failure, dispatcher))
        operation = OperationServers.start(settings, probes)
    except SettingsError:
        listener.close()
        raise

    def stop() -> None:
        log.info("stopping", waiting=len(dispatcher.queue) + len(encoders.queue))
        dispatcher.close()
        encoders.close()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    freeze_loaded()
    port = listener.getsockname()[1]
    ports = {"port": port, **operation.ports}
    log.info("ready", host=settings.host, policy=settings.policy.value, **ports)
    try:
        async with reloading(settings.secret_files):
            await server.serve([listener])
    finally:
        await asyncio.to_thread(operation.stop)
