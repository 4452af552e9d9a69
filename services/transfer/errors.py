"""The error tree of the transfer.

TransferError
├── TransferClosed            the agent was closed
├── TransferUnavailable       NIXL does not start here, or refuses the memory
├── PeerLost                  the peer died, cannot be reached, was removed or was never added
├── PeerRefused               the peer's metadata is not metadata, or is another's
├── ReadTimeout               past its deadline and not drained: see `ReadTimeout.drained`
├── ReadFailed                the transport reports an error
├── BadAddress                outside the memory that we, or the peer, registered
├── FrameError                what lies in a slot is not the segment that was announced
│   ├── CorruptFrame          no frame, another version, or a damaged header
│   ├── StaleSegment          of another epoch, slot generation or attempt
│   └── ForeignSegment        of another request, place, length or content
├── SlabError                 a slot or a length outside the slab
├── SlotError                 a slot that is released twice, or by someone who does not hold it
├── LeasesExhausted           as many leases as allowed are held
└── CreditError               a credit used, or a slot freed, by someone who does not hold it
"""

from concurrent.futures import Future


class TransferError(Exception):
    """Base of what can go wrong between two workers."""


class TransferClosed(TransferError):
    """The agent was closed; nothing touches the landing slot any more."""


class TransferUnavailable(TransferError):
    """NIXL does not start here, or refuses the memory."""


class PeerLost(TransferError):
    """The peer died, cannot be reached, was removed or was never added."""


class PeerRefused(TransferError):
    """The peer's metadata is not metadata, or names another agent."""


class ReadTimeout(TransferError):
    """A READ ran past its deadline.

    The transport cannot take a READ back: a peer that was only stopped still answers it when it
    resumes. Until then the landing slot belongs to the transport.

    Attributes:
        drained: resolves to None once nothing can write to the landing slot any more.
    """

    def __init__(self, message: str, drained: "Future[None]") -> None:
        super().__init__(message)
        self.drained = drained


class ReadFailed(TransferError):
    """The transport reports an error; nothing touches the landing slot any more."""


class BadAddress(TransferError):
    """A range outside the memory that we, or the peer, registered."""


class FrameError(TransferError):
    """What lies in a slot is not the segment that was announced."""


class CorruptFrame(FrameError):
    """No frame, another version, or a damaged header."""


class StaleSegment(FrameError):
    """A segment of another epoch, slot generation or attempt."""


class ForeignSegment(FrameError):
    """A segment of another request, place, length or content."""


class SlabError(TransferError):
    """A slot or a length outside the slab, or a slab that cannot be."""


class SlotError(TransferError):
    """A slot that is released twice, or by someone who does not hold it."""


class LeasesExhausted(TransferError):
    """As many leases as allowed are held."""


class CreditError(TransferError):
    """A credit used, or a slot freed, by someone who does not hold it."""
