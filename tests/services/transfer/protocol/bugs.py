"""Bugs that the search must find: each replaces one method of the product."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

from runtime.core.request import SampledToken
from runtime.engine import Reserve, StepOutput
from services.decode.fetched_streams import FetchedStreams
from services.transfer.credit import CreditPool
from services.transfer.extent import Extent
from services.transfer.fetch import FetchProgress
from services.transfer.landing_slots import LandingSlots
from services.transfer.manifest import Coverage
from services.transfer.outgoing import Outgoing, SentSegment
from services.transfer.pulls import Pull
from services.transfer.sender import Sender
from services.transfer.shares import SharedSlots
from services.transfer.slab import SlotRef
from services.worker.streams import Stream
from tests.services.transfer.protocol.cached_kv import CacheBounds
from tests.services.transfer.protocol.paged_engine import PageBounds
from tests.services.transfer.protocol.parts import Bounds


@dataclass(frozen=True)
class Bug:
    """A replaced method.

    Attributes:
        violation: part of the message of the property that no longer holds.
        bounds: sizes for which the search finds it.
    """

    name: str
    owner: type
    method: str
    replacement: Callable[[Any], Any]
    violation: str
    bounds: Bounds | PageBounds | CacheBounds

    @contextmanager
    def present(self) -> Iterator[None]:
        """Put the bug in."""
        original = getattr(self.owner, self.method)
        with patch.object(self.owner, self.method, self.replacement(original)):
            yield


def _free_encoded(settle: Callable[..., Any]) -> Callable[..., Any]:
    async def mutated(
        self: Sender, outgoing: Outgoing, index: int, sent: SentSegment, *rest: object
    ) -> None:
        await settle(self, outgoing, index, sent, *rest)
        if index in outgoing.unacknowledged:
            rank = sent.route.sender
            self._slots[rank].release(sent.ref, outgoing.reader)
            self._slots[rank] = cast(Any, _Lenient(self._slots[rank]))
            self._pump()

    return mutated


class _Lenient:
    """Slots that may be released twice."""

    def __init__(self, slots: SharedSlots) -> None:
        self._slots = slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)

    def release(self, ref: SlotRef, reader: str) -> None:
        """Free a slot if it is held."""
        if self._slots._pool._held.get(ref.slot) == ref:
            self._slots.release(ref, reader)


def _grant_twice(grants: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(self: CreditPool) -> list[tuple[str, int]]:
        granted: list[tuple[str, int]] = grants(self)
        return [(key, 2 * credits) for key, credits in granted]

    return mutated


def _keep_lease(close: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(self: Sender, key: str) -> None:
        outgoing, lease = self._outgoing.get(key), self._leases._leases.get(key)
        cancelled = outgoing is not None and outgoing.outstanding > 0
        close(self, key)
        if cancelled and lease is not None:
            self._leases._leases[key] = lease

    return mutated


def _count_twice(add: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(self: Coverage, extent: Extent) -> range:
        pages: range = add(self, extent)
        self._missing -= len(pages)
        return pages

    return mutated


def _join_announced(_: object) -> property:
    def mutated(self: FetchProgress) -> bool:
        return self.ended or (self.started and self.expected == len(self.pulls))

    return property(mutated)


def _free_at_once(free_after: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(self: LandingSlots, slot: SlotRef, key: str, user: object) -> None:
        free_after(self, slot, key, None)

    return mutated


def _decode_always(_: object) -> Callable[..., Any]:
    def mutated(self: Pull) -> bool:
        return True

    return mutated


def _forget_to_share(_: object) -> Callable[..., Any]:
    def mutated(self: LandingSlots, slot: SlotRef, key: str) -> None:
        self._slots.release(slot)
        self._credits.freed(key)

    return mutated


def _reserve_late(reserve_and_fetch: Callable[..., Any]) -> Callable[..., Any]:
    async def mutated(self: FetchedStreams, stream: Stream, reserved: Any) -> None:
        if not self._has_room():
            await reserve_and_fetch(self, stream, reserved)
            return
        push = stream.session.push

        def reserve(stream: Stream, first: SampledToken) -> None:
            push(stream, first)
            self._submit(stream, Reserve(stream.request))

        with patch.object(stream.session, "push", reserve):
            sent = self._worker.sent_tokens(stream.start.request)
            await self._fetch_kv(stream, reserved, sent)

    return mutated


def _ignore_deferred(deliver: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(self: FetchedStreams, output: StepOutput) -> None:
        output.deferred.clear()
        deliver(self, output)

    return mutated


_CANCEL = frozenset({"cancel"})

BUGS = (
    Bug(
        "slot freed before the acknowledgement",
        Sender,
        "_settle",
        _free_encoded,
        "is written to while sequence",
        Bounds(sequences=1, sender_slots=1),
    ),
    Bug(
        "credit granted twice",
        CreditPool,
        "grants",
        _grant_twice,
        "has no credit, without a fault",
        Bounds(sequences=1, slots=2),
    ),
    Bug(
        "lease not ended on cancel",
        Sender,
        "close",
        _keep_lease,
        "the prefill worker still holds 1 leases",
        Bounds(sequences=1, faults=1, kinds=_CANCEL, notifications=False),
    ),
    Bug(
        "segment counted twice by the coverage",
        Coverage,
        "add",
        _count_twice,
        "segments are missing from the manifest, without a fault",
        Bounds(sequences=1),
    ),
    Bug(
        "join before the verification",
        FetchProgress,
        "complete",
        _join_announced,
        "attends 'nothing'",
        Bounds(sequences=1),
    ),
    Bug(
        "landing slot freed during a READ",
        LandingSlots,
        "free_after",
        _free_at_once,
        "while another READ may write to it",
        Bounds(sequences=2, layers=1, slots=1, faults=1, kinds=_CANCEL, notifications=False),
    ),
    Bug(
        "decode into pages of an ended sequence",
        Pull,
        "_is_wanted",
        _decode_always,
        "the fetch of sequence 0 ended during a decode",
        Bounds(sequences=1, faults=1, kinds=_CANCEL, notifications=False),
    ),
    Bug(
        "no credit for a slot that becomes free",
        LandingSlots,
        "_free",
        _forget_to_share,
        "deadlock: sequences [0] never end",
        Bounds(sequences=1, slots=2),
    ),
    Bug(
        "decode pages reserved after the prompt was computed",
        FetchedStreams,
        "_reserve_and_fetch",
        _reserve_late,
        "never end",
        PageBounds(),
    ),
    Bug(
        "prefill kept while the reservation waits",
        FetchedStreams,
        "deliver",
        _ignore_deferred,
        "never end",
        PageBounds(),
    ),
)
