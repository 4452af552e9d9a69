"""The error tree of KV transfers.

TransferError
├── TransferClosed            the agent was closed
├── TransferUnavailable       NIXL does not start on this machine, or refuses the memory
├── PeerLost                  the peer died, cannot be reached, was removed or was never added
├── PeerRefused               the metadata is malformed or names another agent, or the peer is known
├── ReadTimeout               a READ is overdue; see `ReadTimeout.drained`
├── ReadFailed                the transport reported an error
├── BadAddress                an address outside the registered memory of either side
├── FrameError                a slot does not contain the announced segment
│   ├── CorruptFrame          no frame, another version, or a damaged header
│   ├── StaleSegment          a frame of another epoch, slot generation or attempt
│   └── ForeignSegment        a segment with another request, extent, length or content
├── SlabError                 a slot or a length outside the slab
├── SlotError                 a slot released twice, or not held
└── CreditError               use of a credit, or return of a slot, that a sequence does not hold
"""

from concurrent.futures import Future


class TransferError(Exception):
    """Base of all errors of a transfer between two workers."""


class TransferClosed(TransferError):
    """The agent was closed; nothing touches the landing slot any more."""


class TransferUnavailable(TransferError):
    """NIXL does not start on this machine, or refuses the memory."""


class PeerLost(TransferError):
    """The peer died, cannot be reached, was removed or was never added."""


class PeerRefused(TransferError):
    """The peer's metadata is malformed or names another agent, or the peer was added already."""


class ReadTimeout(TransferError):
    """A READ is overdue: no READ from its peer has ended for the given time.

    The transport cannot cancel a READ: a peer that was only stopped still answers when it resumes.
    Until then the transport may write to the landing slot.

    Attributes:
        drained: future that resolves to None when nothing can write to the landing slot any more.
    """

    def __init__(self, message: str, drained: "Future[None]") -> None:
        super().__init__(message)
        self.drained = drained


class ReadFailed(TransferError):
    """The transport reported an error; nothing touches the landing slot any more."""


class BadAddress(TransferError):
    """A range outside the registered memory of either side."""


class FrameError(TransferError):
    """A slot does not hold the announced segment."""


class CorruptFrame(FrameError):
    """No frame, another version, or a damaged header."""


class StaleSegment(FrameError):
    """A segment of another epoch, slot generation or attempt."""


class ForeignSegment(FrameError):
    """A segment of another request, or whose extent, length or content was not announced."""


class SlabError(TransferError):
    """A slot or a length outside the slab, or invalid sizes of a slab."""


class SlotError(TransferError):
    """A slot that is released twice, or not held."""


class CreditError(TransferError):
    """Use of a credit, or return of a slot, that a sequence does not hold."""
