"""Bugs of cached pages that the search must find."""

from collections.abc import Callable, Sequence
from typing import Any

from runtime.core.sequence import Purpose, SequenceGroup, SequenceState
from runtime.engine.pages import SequencePages
from runtime.engine.prefixes import Prefixes
from runtime.engine.scheduler import Scheduler
from runtime.pages.pool import PagePool
from services.transfer.frame import FrameHeader
from services.worker.prefill_session import PrefillSession
from tests.services.transfer.protocol.bugs import Bug
from tests.services.transfer.protocol.cached_kv import CacheBounds, Prompt

_Method = Callable[..., Any]

_CHAT = Prompt((2, 2, 2), outputs=3)
_SECOND_TURN = Prompt((2, 2, 2, 1, 1, 3))


def _free_shared(release: _Method) -> _Method:
    def mutated(self: PagePool, pages: Sequence[int]) -> None:
        for page in pages:
            self._references[page] = 1
        release(self, pages)

    return mutated


def _keep_unverified(admit: _Method) -> _Method:
    def mutated(self: SequencePages, group: SequenceGroup) -> None:
        admit(self, group)
        if group.purpose is Purpose.RECEIVE:
            self.prefixes.keep_received(group, len(group.tokens))

    return mutated


def _keep_failed(history_arrived: _Method) -> _Method:
    def mutated(self: Scheduler, request_id: str, *, complete: bool) -> None:
        history_arrived(self, request_id, complete=True)

    return mutated


def _ignore_epoch(of: _Method) -> _Method:
    def mutated(segment: object, *, epoch: str, **rest: object) -> FrameHeader:
        header: FrameHeader = of(segment, epoch="0" * len(epoch), **rest)
        return header

    return mutated


def _keep_partial(keep_decoded: _Method) -> _Method:
    def mutated(self: Prefixes, sequence: SequenceState) -> None:
        sequence.tokens.append(0)  # the last token then counts, although it has no KV
        keep_decoded(self, sequence)
        sequence.tokens.pop()

    return mutated


def _keep_lease(end: _Method) -> _Method:
    def mutated(self: PrefillSession, key: str) -> None:
        job = self._jobs.get(key)
        if job is None or not job.start.cached or not job.outgoing.outstanding:
            end(self, key)
            return
        del self._jobs[key]
        job.expiry.cancel()

    return mutated


CACHED_BUGS = (
    Bug(
        "page freed while another sequence shares it",
        PagePool,
        "release",
        _free_shared,
        "use page 0, which has 0 references",
        CacheBounds((_SECOND_TURN,), cached=_CHAT),
    ),
    Bug(
        "page found before its KV was verified",
        SequencePages,
        "admit",
        _keep_unverified,
        "other sequences can find it",
        CacheBounds((_SECOND_TURN,)),
    ),
    Bug(
        "history kept although it failed the verification",
        Scheduler,
        "history_arrived",
        _keep_failed,
        "a sequence attends to",
        CacheBounds((_SECOND_TURN,), cached=_CHAT, faults=1, kinds=frozenset({"corrupted"})),
    ),
    Bug(
        "page of a stale epoch",
        FrameHeader,
        "of",
        _ignore_epoch,
        "KV of decode0-2 is taken for that of decode0-1",
        CacheBounds(
            (Prompt((2, 2, 3)),),
            cached=Prompt((2, 2)),
            slots=4,
            ways=("early",),
            faults=1,
            kinds=frozenset({"decode crash during a READ", "stale read"}),
        ),
    ),
    Bug(
        "partly filled page shared",
        Prefixes,
        "keep_decoded",
        _keep_partial,
        "['2.2.2', ''] are sent as the KV of (2, 2, 2, 1)",
        CacheBounds((_SECOND_TURN,), cached=Prompt((2, 2, 2), outputs=1)),
    ),
    Bug(
        "lease on history not ended after a cancel",
        PrefillSession,
        "end",
        _keep_lease,
        "1 leases",
        CacheBounds((_SECOND_TURN,), cached=_CHAT, faults=1, kinds=frozenset({"cancel"})),
    ),
)
