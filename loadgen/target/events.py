"""Server-sent events, as far as streams of tokens have them."""

_MOST = 1 << 22
"""Bytes of an event that has no end yet."""


class EventError(ValueError):
    """What came is no stream of events."""


class Events:
    """Takes bytes as they come, and gives back the data of each event that is whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Raises EventError for an event that grows without an end."""
        rest = self._rest + received
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        *whole, self._rest = rest.split(b"\n\n")
        if len(self._rest) > _MOST:
            raise EventError(f"an event of more than {_MOST} bytes")
        return [data for event in whole if (data := _data(event)) is not None]

    @property
    def unfinished(self) -> bool:
        """Whether the last event has no end."""
        return bool(self._rest.strip())


def _data(event: bytes) -> bytes | None:
    """Its data lines; None for a comment, or an event of another kind."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None
