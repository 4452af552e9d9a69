"""Parser of server-sent events, as used in token streams."""

_MAX_EVENT_BYTES = 1 << 22


class EventError(ValueError):
    """The data is not a valid stream of events."""


class Events:
    """Incremental parser that returns the data of each complete event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Add bytes and return the data of the events they complete.

        Raises:
            EventError: if an unfinished event exceeds the size limit.
        """
        rest = self._rest + received
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        *whole, self._rest = rest.split(b"\n\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise EventError(f"event of more than {_MAX_EVENT_BYTES} bytes")
        return [data for event in whole if (data := _data(event)) is not None]

    @property
    def unfinished(self) -> bool:
        """Whether the last event is incomplete."""
        return bool(self._rest.strip())


def _data(event: bytes) -> bytes | None:
    """Return the data lines of an event, or None if it has none, for example a comment."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None
