"""Routes of the live page: its files, and the state that it shows.

The files are public; they contain nothing about the deployment. The state needs an API key.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.gateway.gateway import Gateway
from services.gateway.live import LiveState

STATE_PATH = "/page/state"

_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = {
    "cache-control": "no-cache",  # stored, but revalidated: an upgrade changes all files together
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str
    etag: str


class Page:
    """The live page of a gateway. Reads the files of the page once."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._state = LiveState(gateway)
        self._files = _load()

    def attach(self, app: FastAPI) -> None:
        """Add the routes. They are no part of the documented API."""
        app.get(STATE_PATH, include_in_schema=False)(self.state)
        for path, endpoint in (("/", self.index), ("/page/{name}", self.file)):
            app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(endpoint)

    async def index(self, request: Request) -> Response:
        """Return the HTML of the live page."""
        return _respond(request, self._files[_INDEX])

    async def file(self, request: Request, name: str) -> Response:
        """Return a file that the page refers to."""
        if name == _INDEX or name not in self._files:
            raise HTTPException(404)
        return _respond(request, self._files[name])

    async def state(self, request: Request) -> Response:
        """Return the state of the deployment, with the recent requests of the key's tenant."""
        tenant = self._gateway.keys.tenant(request.headers.get("authorization"))
        return Response(
            orjson.dumps(await self._state.describe(tenant)),
            media_type="application/json",
            headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
        )


def _load() -> dict[str, _File]:
    """Return the files of the page by name."""
    found = {}
    for file in files("services.gateway").joinpath("page").iterdir():
        if media_type := _MEDIA_TYPES.get("." + file.name.rpartition(".")[2]):
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[file.name] = _File(content, media_type, etag)
    return found


def _respond(request: Request, file: _File) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    known = request.headers.get("if-none-match", "").split(",")
    if file.etag in (tag.strip().removeprefix("W/") for tag in known):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
