"""A state of the whole system: two workers, and everything between them."""

from typing import Any, NamedTuple

from tests.services.transfer.protocol.parts import Content

OPEN, END = "open", "end"
"""Messages that begin and end a session."""


class Link(NamedTuple):
    """A session between the workers.

    Attributes:
        name: name of the session.
        peer: the prefill worker's agent, which names its epoch.
        up: messages on their way to the prefill worker; None once it has ended the session.
        down: messages on their way to the decode worker; None once it has ended the session.
    """

    name: str
    peer: str
    up: tuple[Any, ...] | None = ()
    down: tuple[Any, ...] | None = ()


class State(NamedTuple):
    """A state of the whole system.

    Attributes:
        prefill, decode: numbers of the workers' states.
        links: the sessions.
        notes: notifications on their way: (receiver, sender, message).
        reading: READs that have not ended: landing slot, and what the slot held at their start.
        faults: faults that can still happen.
    """

    prefill: int
    decode: int
    links: tuple[Link, ...]
    notes: tuple[tuple[str, str, bytes], ...]
    reading: tuple[tuple[int, Content], ...]
    faults: int


def open_links(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """Return the links that at least one side has not ended."""
    return tuple(link for link in links if link.up is not None or link.down is not None)


def with_link(state: State, at: int, link: Link) -> State:
    """Return a state with another link in one place."""
    links = (*state.links[:at], link, *state.links[at + 1 :])
    return state._replace(links=open_links(links))
