"""Access to the HTTP interface: names of the server, origins of pages, clients behind proxies.

A request is refused if its ``Host`` is not allowed (`services.common.hosts`), or if its client has
too many requests in progress through trusted proxies. Direct clients are limited by connections
(`services.gateway.http.connection`).
"""

import re

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.client_limit import ClientLimit
from services.common.clients import FORWARDED_FOR
from services.common.errors import Forbidden, Overloaded, ServiceError
from services.gateway.gateway import Gateway
from services.gateway.http.middleware import error_response

_EXPOSED_HEADERS = ("retry-after", "x-request-id", "request-id")


def allow_origins(app: ASGIApp, origins: list[str]) -> ASGIApp:
    """Return the application with CORS for these origins.

    ``*`` allows all origins, and a value such as ``moz-extension://*`` all origins of a scheme:
    each installation of a browser extension may have an origin of its own.

    API keys are sent in a header and not as credentials of the browser, so a page needs an API key.
    """
    schemes = [re.escape(origin[:-1]) for origin in origins if origin.endswith("://*")]
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_origin_regex=f"({'|'.join(schemes)}).+" if schemes else None,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        expose_headers=_EXPOSED_HEADERS,
        allow_private_network=True,
    )


class AccessMiddleware:
    """ASGI middleware that identifies the client of a request, or refuses the request.

    ``client`` in the state of a request is a `services.common.clients.Client`.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        settings = gateway.settings
        self._app = app
        self._clients = gateway.clients
        self._hosts = settings.host_check(authenticated=gateway.keys.required)
        self._requests = ClientLimit(settings.max_connections, settings.max_client_connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        peer = scope.get("client")
        client = self._clients.identify(peer and peer[0], headers.getlist(FORWARDED_FOR))
        scope["state"]["client"] = client
        refusal = self._hosts.refusal(headers.getlist("host")) if self._hosts else None
        if refusal is not None:
            await _refuse(Forbidden(refusal), scope, receive, send)
        elif not client.forwarded:
            await self._app(scope, receive, send)
        elif self._requests.take(client.name):
            try:
                await self._app(scope, receive, send)
            finally:
                self._requests.release(client.name)
        else:
            error = Overloaded("this client has too many requests in progress")
            await _refuse(error, scope, receive, send)


async def _refuse(error: ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
    scope["state"]["error"] = error
    await error_response(error, scope)(scope, receive, send)
