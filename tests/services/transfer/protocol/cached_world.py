"""A prefill worker and decode workers with cached pages, which read from each other."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

from headrace.v1 import prefill_pb2 as pb
from tests.services.transfer.protocol.cached_kv import CacheBounds
from tests.services.transfer.protocol.cached_side import SideView
from tests.services.transfer.protocol.cached_workers import CachedDecode, CachedPrefill
from tests.services.transfer.protocol.machine import Given, Machine
from tests.services.transfer.protocol.parts import EMPTY, Content, Violation
from tests.services.transfer.protocol.state import END
from tests.services.transfer.protocol.world import Move

PREFILL = 0
"""Number of the prefill worker; those of the decode workers follow."""


class Session(NamedTuple):
    """A session between two workers.

    Attributes:
        client, server: numbers of the worker that has opened it, and of the other one.
        up, down: messages on their way from and to the client; None once their receiver has ended
            the session. The last one may be the end of the session.
    """

    name: str
    client: int
    server: int
    up: tuple[Any, ...] | None = ()
    down: tuple[Any, ...] | None = ()


class Reading(NamedTuple):
    """A READ that has not ended.

    Attributes:
        reader, source: numbers of the workers.
        slot, remote: slots of the two.
        began: what the source held at its start.
    """

    reader: int
    slot: int
    source: int
    remote: int
    began: Content


class CachedState(NamedTuple):
    """A state of the whole system.

    Attributes:
        workers: numbers of the workers' states, the prefill worker's first.
        sessions: sessions that at least one side has not ended.
        readings: READs that have not ended.
        faults: faults that can still happen.
        excused: whether requests may fail, because of a fault that cannot be recovered from.
    """

    workers: tuple[int, ...]
    sessions: tuple[Session, ...]
    readings: tuple[Reading, ...]
    faults: int
    excused: bool = False


class CachedWorld:
    """The transitions of the system, and the properties of its states.

    Faults, by the names in `CacheBounds.kinds`: "cancel" (of a request), "deadline" (of a request,
    a fetch or a pin), "lease expiry", "corrupted" and "read failed" (in either direction), "prefill
    crash", "decode crash", and "decode crash during a READ" from this worker.

    With "lost messages", messages on their way may be lost in a crash. With "stale read", a READ
    from a worker that has crashed may read what its next epoch has in the slot.
    """

    def __init__(self, bounds: CacheBounds) -> None:
        self._bounds = bounds
        decodes = range(bounds.decodes)
        self._names = ("prefill", *(f"decode{number}" for number in decodes))
        self._machines: tuple[Machine[SideView], ...] = (
            Machine(partial(CachedPrefill, bounds)),
            *(Machine(partial(CachedDecode, bounds, number)) for number in decodes),
        )

    @property
    def executed(self) -> int:
        """Number of transitions of single workers that were executed."""
        return sum(machine.replays for machine in self._machines)

    def start(self) -> CachedState:
        """Return the first state."""
        workers = tuple(machine.start(1) for machine in self._machines)
        return CachedState(workers, (), (), self._bounds.faults)

    def close(self) -> None:
        """End all workers."""
        for machine in self._machines:
            machine.close()

    def moves(self, state: CachedState) -> Iterator[Move]:
        """Yield the transitions that are possible in a state."""
        views = self._views(state)
        yield from self._requests(state, views)
        yield from self._messages(state)
        for side, view in enumerate(views):
            for given in view.inputs:
                yield from self._own(state, side, given)
        yield from self._reads(state, views)
        if state.faults:
            yield from self._crashes(state, views)

    def check(self, state: CachedState) -> None:
        """Check a state.

        Raises:
            Violation: a request has failed, although no fault or one of history alone happened.
        """
        if not state.excused:
            for view in self._views(state):
                for number, (result, _) in enumerate(view.results):
                    if result.startswith("failed"):
                        raise Violation(f"request {number} {result}, without a fault")

    def check_end(self, state: CachedState) -> None:
        """Check a state in which nothing happens any more unless another request arrives.

        Raises:
            Violation: a request has not ended, or something is still held.
        """
        views = self._views(state)
        results = [result for view in views for result in enumerate(view.results)]
        if waiting := [number for number, (result, _) in results if result == "running"]:
            raise Violation(f"deadlock: requests {waiting} never end")
        for name, view in zip(self._names, views, strict=True):
            if view.held:
                raise Violation(f"{name} still holds {view.held} at the end")

    def _views(self, state: CachedState) -> list[SideView]:
        return [m.views[at] for m, at in zip(self._machines, state.workers, strict=True)]

    def _requests(self, state: CachedState, views: list[SideView]) -> Iterator[Move]:
        """Yield the start of the next request of each worker, which need not happen.

        After a crash, clients repeat requests that have failed.
        """
        epoch = views[PREFILL].epoch
        for worker, view in enumerate(views):
            waiting = [
                number
                for number, (result, last) in enumerate(view.results)
                if not result or (result.startswith("failed") and last < epoch)
            ]
            for number in waiting[:1]:
                for how in self._bounds.ways:
                    given = "request", number, how, epoch
                    yield self._move(state, worker, given, progress=False)

    def _messages(self, state: CachedState) -> Iterator[Move]:
        for at, session in enumerate(state.sessions):
            if session.up:
                message, rest = session.up[0], session.up[1:]
                given: Given = ("command", session.name, message)
                if message == END:
                    given, rest = ("end", session.name), None  # type: ignore[assignment]
                sessions = _with(state.sessions, at, session._replace(up=rest))
                after = state._replace(sessions=_open(sessions))
                yield self._move(after, session.server, given)
            if session.down:
                message, rest = session.down[0], session.down[1:]
                given = ("event", session.name, message)
                if type(message) is tuple:
                    given = ("ended", session.name, message[1])
                sessions = _with(state.sessions, at, session._replace(down=rest))
                after = state._replace(sessions=_open(sessions))
                yield self._move(after, session.client, given)

    def _own(self, state: CachedState, worker: int, given: Given) -> Iterator[Move]:
        """Yield an input of a worker's own, if it is not a fault that cannot happen."""
        kind = given[0]
        if kind == "step":
            yield self._move(state, worker, given)
        elif state.faults and kind in self._bounds.kinds:
            harmless = kind == "cancel" or (kind == "lease expiry" and worker != PREFILL)
            yield self._fault(state, worker, given, excused=not harmless)

    def _reads(self, state: CachedState, views: list[SideView]) -> Iterator[Move]:
        for reading in state.readings:
            reader, slot, source, remote, began = reading
            after = state._replace(readings=tuple(r for r in state.readings if r != reading))
            move, kinds, now = self._move, self._bounds.kinds, views[source].contents[remote]
            peer = next(peer for at, peer, _ in views[reader].reads if at == slot)
            if peer != views[source].agent:
                yield move(after, reader, ("read", slot, "lost", None))
                if "stale read" in kinds and now != EMPTY:
                    yield move(after, reader, ("read", slot, "done", now), progress=False)
                continue
            for content in dict.fromkeys((began, now)):
                yield move(after, reader, ("read", slot, "done", content))
            damaged = began._replace(kv="damaged")
            for kind, how, found in (
                ("corrupted", "done", damaged),
                ("read failed", "failed", None),
            ):
                if state.faults and kind in kinds:
                    given = ("read", slot, how, found)
                    yield self._fault(after, reader, given, excused=reader != PREFILL)

    def _crashes(self, state: CachedState, views: list[SideView]) -> Iterator[Move]:
        for worker, view in enumerate(views):
            kind = "prefill crash" if worker == PREFILL else "decode crash"
            is_read = any(reading.source == worker for reading in state.readings)
            kinds = {kind, f"{kind} during a READ"} if is_read else {kind}
            if not kinds & self._bounds.kinds:
                continue
            number = self._machines[worker].start(view.epoch + 1)
            for is_lost in (False, True) if "lost messages" in self._bounds.kinds else (False,):
                sessions = (_crashed(session, worker, is_lost) for session in state.sessions)
                after = state._replace(
                    workers=_with(state.workers, worker, number),
                    sessions=_open(sessions),
                    readings=tuple(r for r in state.readings if r.reader != worker),
                    faults=state.faults - 1,
                    excused=True,
                )
                lost = ", its messages are lost" if is_lost else ""
                label = f"{self._names[worker]} crashes{lost} (fault)"
                yield Move(label, False, _constant(after))

    def _fault(self, state: CachedState, worker: int, given: Given, *, excused: bool) -> Move:
        after = state._replace(faults=state.faults - 1, excused=state.excused or excused)
        move = self._move(after, worker, given, progress=False)
        return Move(f"{move.label} (fault)", False, move.run)

    def _move(
        self, state: CachedState, worker: int, given: Given, *, progress: bool = True
    ) -> Move:
        label = f"{self._names[worker]}: {_text(given)}"
        return Move(label, progress, lambda: self._apply(state, worker, given))

    def _apply(self, state: CachedState, worker: int, given: Given) -> Any:
        number, outputs = self._machines[worker].step(state.workers[worker], given)
        sessions, readings = state.sessions, state.readings
        for output in outputs:
            match output:
                case "open", name, address:
                    sessions = (*sessions, Session(name, worker, self._names.index(address)))
                case "read", slot:
                    view = self._machines[worker].views[number]
                    readings = tuple(sorted((*readings, self._reading(state, worker, slot, view))))
                case _:
                    sessions = tuple(_sent(each, output) for each in sessions)
        workers = _with(state.workers, worker, number)
        return state._replace(workers=workers, sessions=_open(sessions), readings=readings)

    def _reading(self, state: CachedState, worker: int, slot: int, view: SideView) -> Reading:
        """Return a READ that has begun."""
        peer, remote = next((peer, remote) for at, peer, remote in view.reads if at == slot)
        source = self._names.index(peer.partition("-")[0])
        there = self._machines[source].views[state.workers[source]]
        began = there.contents[remote] if peer == there.agent else EMPTY
        return Reading(worker, slot, source, remote, began)


def _sent(session: Session, output: Given) -> Session:
    """Return a session after an output of one of its sides."""
    kind, name, *rest = output
    if name != session.name:
        return session
    up, down = session.up, session.down
    match kind:
        case "command" if up is not None:
            up = (*up, rest[0])
        case "event" if down is not None:
            down = (*down, rest[0])
        case "end":  # of the client
            up, down = (None if up is None else (*up, END)), None
        case "ended":  # of the server
            up, down = None, (None if down is None else (*down, (END, rest[0])))
    return session._replace(up=up, down=down)


def _crashed(session: Session, worker: int, is_lost: bool) -> Session:
    """Return a session after the crash of a worker."""
    up, down = session.up, session.down
    if session.client == worker:
        kept = () if is_lost or up is None else up
        return session._replace(down=None, up=None if up is None else (*kept, END))
    if session.server != worker or up is None:  # an earlier epoch may have ended it
        return session
    kept = () if is_lost or down is None else down
    return session._replace(up=None, down=None if down is None else (*kept, (END, "UNAVAILABLE")))


def _open(sessions: Any) -> tuple[Session, ...]:
    """Return the sessions that at least one side has not ended."""
    return tuple(each for each in sessions if each.up is not None or each.down is not None)


def _with(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _constant(state: CachedState) -> Callable[[], Any]:
    return lambda: state


@cache
def _text(given: Given) -> str:
    """Return an input as text, with its messages in words."""
    kind, *parts = given
    if kind in ("command", "event"):
        message: Any = (pb.PrefillCommands if kind == "command" else pb.PrefillEvents)()
        message.ParseFromString(parts[1])
        items = message.commands if kind == "command" else message.events
        names = [each.WhichOneof(kind) for each in items]
        return f"{kind} {parts[0]}: {', '.join(map(str, names))}"
    return " ".join(str(part.kv) if isinstance(part, Content) else str(part) for part in given)
