"""Mutations of HTTP requests: of the head, of the framing of the body, and of any byte."""

from random import Random

from tests.programs.fuzzing.messages import mutated_bytes

_LINES = (
    *(
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip, chunked",
        b"transfer-encoding:chunked ",
    ),
    *(b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 1e3", b"Content-Length: 0x10"),
    *(b"Content-Length: 99999999999999999999", b"Content-Length : 3", b"Content-Length: 3, 3"),
    *(b"Host: a", b"Host:", b"Host: a b", b"Connection: close", b"Connection: upgrade"),
    *(b"Upgrade: h2c", b"Upgrade: websocket", b"Expect: 100-continue", b"Expect: x"),
    *(b"X: \xff\xfe", b"X: a\x00b", b"X: a\rb", b" folded", b"no colon", b": empty", b"X y: z"),
    *(b"Authorization: Bearer \xff", b"Authorization: ", b"Content-Type: text/plain"),
    *(b"X-Request-Id: " + b"x" * 300, b"X-Request-Id: \xe9", b"Content-Encoding: gzip"),
    *(b"X: " + b"y" * 9000, b"Range: bytes=0-", b"Trailer: X", b"TE: trailers"),
)
_TARGETS = (
    *(b"/", b"*", b"//", b"/..", b"/%00", b"/%", b"/\xff", b"http://other/health", b"/health#x"),
    *(b"/v1/completions/", b"/v1/models/%2e%2e", b"/v1/models?x=\xe9", b"/?" + b"a" * 9000, b"a b"),
)
_METHODS = (
    b"GET",
    b"PUT",
    b"HEAD",
    b"OPTIONS",
    b"CONNECT",
    b"TRACE",
    b"post",
    b"P\x00",
    b"",
    b"X" * 99,
)
_VERSIONS = (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.10", b"HTTP/1.1 x", b"ICY", b"")
_CHUNKS = (
    *(
        b"0\r\n\r\n",
        b"-1\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"5;x=y\r\nabcde\r\n0\r\n\r\n",
        b"g\r\n",
    ),
    *(b"3\r\nabcd\r\n0\r\n\r\n", b"3\nabc\n0\n\n", b"1\r\na\r\n0\r\nX: y\r\n\r\n"),
)


def request(method: str, path: str, body: bytes, headers: tuple[bytes, ...] = ()) -> bytes:
    """Return a valid HTTP/1.1 request."""
    lines = (
        f"{method} {path} HTTP/1.1".encode(),
        b"Host: 127.0.0.1",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        *headers,
    )
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def mutated(valid: bytes, rng: Random) -> bytes:
    """Return a request with one to three mutations."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        valid = _mutate(valid, rng)
    return valid


def _mutate(data: bytes, rng: Random) -> bytes:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    words = first.split(b" ")
    match rng.randrange(9):
        case 0:
            return mutated_bytes(data, rng)
        case 1:
            words[0] = rng.choice(_METHODS)
        case 2 if len(words) > 1:
            words[1] = rng.choice(_TARGETS)
        case 3:
            words[-1] = rng.choice(_VERSIONS)
        case 4 if lines:
            del lines[rng.randrange(len(lines))]
        case 5:
            body = rng.choice(_CHUNKS)
            lines.append(_LINES[0])
        case 6:
            body += b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * rng.choice((1, 2, 40))
        case 7:
            lines *= rng.choice((2, 60))
        case _:
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(_LINES))
    end = rng.choice((b"\r\n",) * 20 + (b"\n", b"\r"))
    return end.join((b" ".join(words), *lines)) + end * 2 + body
