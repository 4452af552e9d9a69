"""Ports of services with mutual TLS, and clients with any certificate or without one."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from services.common.grpc_server import GrpcServer
from services.common.http_server import HttpServer, listen
from services.common.metrics_server import start_metrics_server
from services.common.tls import MutualTls
from services.router.app import create_app
from services.router.encoders.dispatcher import EncoderDispatcher
from services.router.server import http_config
from services.router.settings import RouterSettings
from tests.services.certificates import Authority

LIMIT_S = 60
HTTP = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # preface and empty settings


@asynccontextmanager
async def router_port(
    tls: MutualTls | None = None,
    settings: Mapping[str, str] | None = None,
    encoders: EncoderDispatcher | None = None,
) -> AsyncIterator[int]:
    listener = listen("127.0.0.1", 0)
    app = create_app(RouterSettings.model_validate(settings or {}), encoders=encoders)
    server = HttpServer(http_config(app, tls))
    serving = asyncio.create_task(server.serve([listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


@asynccontextmanager
async def worker_port(tls: MutualTls) -> AsyncIterator[int]:
    server = GrpcServer("127.0.0.1:0", [], tls=tls)
    await server.start()
    yield server.port
    await server.stop(0)


@asynccontextmanager
async def metrics_port(tls: MutualTls) -> AsyncIterator[int]:
    server = start_metrics_server("127.0.0.1", 0, CollectorRegistry(), tls=tls)
    yield server.server_port
    await asyncio.to_thread(server.shutdown)
    server.server_close()


SERVERS = {"router": router_port, "worker": worker_port, "metrics": metrics_port}


async def request(port: int, name: str, context: ssl.SSLContext | None) -> tuple[bytes, bytes]:
    """Send a request; return the server's certificate and the first bytes of its answer."""
    if context is not None and name == "worker":
        context.set_alpn_protocols(["h2"])
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            writer.write(HTTP2 if name == "worker" else HTTP)
            answer = await reader.read(12)
            shown = writer.get_extra_info("ssl_object")
            return shown.getpeercert(binary_form=True) if shown else b"", answer
        finally:
            writer.transport.abort()


def client_context(
    trusted: Authority, own: Authority | None = None, *, expired: bool = False
) -> ssl.SSLContext:
    """Return a client's context with the certificate that ``own`` has signed, or without one."""
    context = ssl.create_default_context(cafile=trusted.issue("trusted").ca)
    if own is not None:
        files = own.issue("client", expired=expired)
        context.load_cert_chain(files.certificate, files.key)
    return context


async def is_refused(port: int, name: str, context: ssl.SSLContext | None) -> bool:
    """Return whether a connection ends without an answer."""
    try:
        return not (await request(port, name, context))[1]
    except TimeoutError:
        return False
    except OSError:  # a TLS alert or a reset
        return True
