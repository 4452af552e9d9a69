"""The gateway process: HTTP and gRPC on one event loop, from start to drained shutdown."""

import asyncio
import math

import structlog
import uvloop

from services.common.addresses import bracketed
from services.common.errors import SettingsError
from services.common.file_limit import check_file_limit
from services.common.grpc_server import GrpcServer
from services.common.http_server import HttpServer
from services.common.memory import freeze_loaded
from services.common.metrics_server import OperationServers
from services.common.probes import Probes
from services.common.secret_files import reloading
from services.common.signals import stop_on_signals
from services.gateway.gateway import Gateway
from services.gateway.http.routes import build_app
from services.gateway.http.server import http_config, listen_for_clients
from services.gateway.keys import ApiKeys
from services.gateway.rpc import build_rpc_server
from services.gateway.served import Served
from services.gateway.settings import GatewaySettings

log = structlog.get_logger()

loop_factory = uvloop.new_event_loop

_GRPC_GRACE_S = 2.0
"""Time after the drain until the remaining gRPC calls are cancelled, seconds."""
_HEALTH_PERIOD_S = 1.0


async def serve(settings: GatewaySettings) -> None:
    """Run a gateway until SIGTERM or SIGINT, then drain it.

    On SIGHUP, read the API keys and certificates again at once.

    Raises:
        SettingsError: if the model, the API keys or a port is not available.
    """
    check_file_limit(settings.max_connections)
    keys = ApiKeys.load(settings.api_keys_file)
    served = await asyncio.to_thread(Served.load, settings)
    listener = listen_for_clients(
        settings.host,
        settings.port,
        write_timeout_s=settings.write_timeout_s,
        reuse_port=settings.reuse_port,
    )
    gateway = Gateway(settings, served.model, keys, encoder=served.encoder)
    secret_files = [*settings.secret_files, *([keys] if keys.required else [])]
    gateway.metrics.secrets.observe(secret_files, settings.token_check)
    try:
        http = HttpServer(http_config(build_app(gateway), gateway))
        rpc = build_rpc_server(gateway, f"{bracketed(settings.host)}:{settings.grpc_port}")
        operation = OperationServers.start(
            settings, Probes(gateway.not_ready), gateway.metrics.registry, settings.metrics_port
        )
    except SettingsError:
        listener.close()
        await gateway.close()
        raise
    stop = stop_on_signals()
    freeze_loaded()
    await rpc.start()
    serving = asyncio.create_task(http.serve([listener]))
    health = asyncio.create_task(_update_health(gateway, rpc))
    port = listener.getsockname()[1]
    ports = {"port": port, "grpc_port": rpc.port, "metrics_port": port, **operation.ports}
    encoder = served.encoder.name if served.encoder else None
    log.info("listening", model=served.model.name, encoder=encoder, **ports)
    try:
        stopping = asyncio.create_task(stop.wait())
        async with reloading(secret_files):
            await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        log.info("draining", limit_s=settings.drain_s, requests=gateway.running)
        health.cancel()
        gateway.draining = True
        gateway.metrics.ready.set(math.nan)
        if settings.reuse_port:  # other gateways take the new connections
            http.stop_accepting()
        await rpc.set_serving(False)
        await gateway.drain(settings.drain_s)
    finally:
        stopping.cancel()
        http.should_exit = True
        await rpc.stop(_GRPC_GRACE_S)
        await serving
        await gateway.close()
        await asyncio.to_thread(operation.stop)
        log.info("stopped")


async def _update_health(gateway: Gateway, rpc: GrpcServer) -> None:
    """Report the state of ``/ready`` by metric and ``grpc.health.v1``, once per second."""
    while True:
        try:
            ready = await gateway.not_ready() is None
        except Exception:
            log.exception("checking readiness failed")
            ready = False
        gateway.metrics.ready.set(ready)
        await rpc.set_serving(ready)
        await asyncio.sleep(_HEALTH_PERIOD_S)
