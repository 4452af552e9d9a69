"""Reading of request bodies: media type, size, time and memory are limited."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request

from services.common.errors import ClientGone, TooLarge, UnsupportedMediaType
from services.gateway.http.middleware import RequestTimeout

_JSON = "application/json"


def require_json(request: Request) -> None:
    """Raise `UnsupportedMediaType` unless the body is declared as JSON.

    Any web page can make a browser send a body with another type, or none, to this server. For
    JSON, the browser first sends a CORS preflight request, which the server answers for allowed
    origins only.
    """
    declared = request.headers.get("content-type", "")
    if declared.partition(";")[0].strip().lower() != _JSON:
        raise UnsupportedMediaType(
            f"the content type must be {_JSON}, not {declared[:128]!r}"
            if declared
            else f"the header 'Content-Type: {_JSON}' is missing"
        )


async def read_body(
    request: Request, grow: Callable[[int], None], *, limit: int, timeout_s: float
) -> bytes:
    """Read the request body, up to ``limit`` bytes within ``timeout_s`` seconds.

    Args:
        grow: adds bytes to the buffer of the request, see `services.gateway.buffers`.

    Raises:
        TooLarge: if the body is longer.
        Overloaded: if there is no memory for it.
        RequestTimeout: if the body does not arrive in time.
        ClientGone: if the client disconnects.
    """
    too_large = TooLarge(f"the body is larger than {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s), aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                if len(body) + len(chunk) > limit:
                    raise too_large
                if chunk:  # the last one is empty
                    grow(len(chunk))
                    body += chunk
    except ClientDisconnect:
        raise ClientGone("the client disconnected before its request was complete") from None
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {timeout_s} s") from None
    return bytes(body)
