"""A prefill and a decode worker with cached pages, which read from each other."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from headrace.v1 import prefill_pb2 as pb
from tests.services.transfer.protocol.cached_kv import CacheBounds
from tests.services.transfer.protocol.cached_side import SideView
from tests.services.transfer.protocol.cached_workers import CachedDecode, CachedPrefill
from tests.services.transfer.protocol.machine import Given, Machine
from tests.services.transfer.protocol.parts import EMPTY, Content, Violation
from tests.services.transfer.protocol.state import END
from tests.services.transfer.protocol.world import Move

PREFILL, DECODE = 0, 1
_NAMES = "prefill", "decode"


class Session(NamedTuple):
    """A session of one worker, the client, with the other one.

    Attributes:
        client: number of the worker that has opened it.
        up, down: messages on their way from and to the client; None once their receiver has ended
            the session. The last one may be the end of the session.
    """

    name: str
    client: int
    up: tuple[Any, ...] | None = ()
    down: tuple[Any, ...] | None = ()


class Reading(NamedTuple):
    """A READ that has not ended: who reads into which slot, and what the source held at first."""

    reader: int
    slot: int
    began: Content


class CachedState(NamedTuple):
    """A state of the whole system.

    Attributes:
        prefill, decode: numbers of the workers' states.
        sessions: sessions that at least one side has not ended.
        readings: READs that have not ended.
        faults: faults that can still happen.
        excused: whether requests may fail, because of a fault that cannot be recovered from.
    """

    prefill: int
    decode: int
    sessions: tuple[Session, ...]
    readings: tuple[Reading, ...]
    faults: int
    excused: bool = False


class CachedWorld:
    """The transitions of the system, and the properties of its states.

    Faults, by the names in `CacheBounds.kinds`: "cancel" (of a request), "deadline" (of a request,
    a fetch or a pin), "lease expiry", "corrupted" and "read failed" (in either direction), "prefill
    crash", "decode crash". With "stale read", a READ from a worker that has crashed may read what
    its next epoch has in the slot.
    """

    def __init__(self, bounds: CacheBounds) -> None:
        self._bounds = bounds
        self._machines: tuple[Machine[SideView], Machine[SideView]] = (
            Machine(lambda epoch: CachedPrefill(bounds, epoch)),
            Machine(lambda epoch: CachedDecode(bounds, epoch)),
        )

    @property
    def executed(self) -> int:
        """Number of transitions of single workers that were executed."""
        return sum(machine.replays for machine in self._machines)

    def start(self) -> CachedState:
        """Return the first state."""
        prefill, decode = (machine.start(1) for machine in self._machines)
        return CachedState(prefill, decode, (), (), self._bounds.faults)

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
            for number, result in enumerate(self._views(state)[DECODE].results):
                if result.startswith("failed"):
                    raise Violation(f"request {number} {result}, without a fault that allows it")

    def check_end(self, state: CachedState) -> None:
        """Check a state in which nothing happens any more unless another request arrives.

        Raises:
            Violation: a request has not ended, or something is still held.
        """
        views = self._views(state)
        waiting = [n for n, result in enumerate(views[DECODE].results) if result == "running"]
        if waiting:
            raise Violation(f"deadlock: requests {waiting} never end")
        for name, view in zip(_NAMES, views, strict=True):
            if view.held:
                raise Violation(f"the {name} worker still holds {view.held} at the end")

    def _views(self, state: CachedState) -> tuple[SideView, SideView]:
        prefill, decode = self._machines
        return prefill.views[state.prefill], decode.views[state.decode]

    def _requests(
        self, state: CachedState, views: tuple[SideView, SideView]
    ) -> Iterator[Move]:
        """Yield the start of the next request, which need not happen."""
        results = views[DECODE].results
        if "" in results:
            for how in self._bounds.ways:
                given = "request", results.index(""), how, views[PREFILL].epoch
                yield self._move(state, DECODE, given, progress=False)

    def _messages(self, state: CachedState) -> Iterator[Move]:
        for at, session in enumerate(state.sessions):
            if session.up:
                message, rest = session.up[0], session.up[1:]
                given: Given = ("command", session.name, message)
                if message == END:
                    given, rest = ("end", session.name), None  # type: ignore[assignment]
                after = _with(state, at, session._replace(up=rest))
                yield self._move(after, 1 - session.client, given)
            if session.down:
                message, rest = session.down[0], session.down[1:]
                given = ("event", session.name, message)
                if type(message) is tuple:
                    given = ("ended", session.name, message[1])
                after = _with(state, at, session._replace(down=rest))
                yield self._move(after, session.client, given)

    def _own(self, state: CachedState, side: int, given: Given) -> Iterator[Move]:
        """Yield an input of a worker's own, if it is not a fault that cannot happen."""
        kind = given[0]
        if kind == "step":
            yield self._move(state, side, given)
        elif state.faults and kind in self._bounds.kinds:
            harmless = kind == "cancel" or (kind == "lease expiry" and side == DECODE)
            yield self._fault(state, side, given, excused=not harmless)

    def _reads(self, state: CachedState, views: tuple[SideView, SideView]) -> Iterator[Move]:
        for reading in state.readings:
            source = views[1 - reading.reader]
            slot = reading.slot
            peer, remote = next(
                (peer, remote) for at, peer, remote in views[reading.reader].reads if at == slot
            )
            after = state._replace(readings=tuple(r for r in state.readings if r != reading))
            move, kinds = self._move, self._bounds.kinds
            now = source.contents[remote]
            if peer != source.agent:
                yield move(after, reading.reader, ("read", slot, "lost", None))
                if "stale read" in kinds and now != EMPTY:
                    yield move(after, reading.reader, ("read", slot, "done", now), progress=False)
                continue
            for content in dict.fromkeys((reading.began, now)):
                yield move(after, reading.reader, ("read", slot, "done", content))
            damaged = reading.began._replace(kv="damaged")
            for kind, how, content in (
                ("corrupted", "done", damaged),
                ("read failed", "failed", None),
            ):
                if state.faults and kind in kinds:
                    given = ("read", slot, how, content)
                    is_forward = reading.reader == DECODE
                    yield self._fault(after, reading.reader, given, excused=is_forward)

    def _crashes(self, state: CachedState, views: tuple[SideView, SideView]) -> Iterator[Move]:
        for side, view in enumerate(views):
            if f"{_NAMES[side]} crash" not in self._bounds.kinds:
                continue
            number = self._machines[side].start(view.epoch + 1)
            for is_lost in (False, True):
                sessions = (_crashed(session, side, is_lost) for session in state.sessions)
                after = state._replace(
                    **{_NAMES[side]: number},
                    sessions=_open(sessions),
                    readings=tuple(r for r in state.readings if r.reader != side),
                    faults=state.faults - 1,
                    excused=True,
                )
                lost = ", its messages are lost" if is_lost else ""
                yield Move(f"{_NAMES[side]} crashes{lost} (fault)", False, _constant(after))

    def _fault(self, state: CachedState, side: int, given: Given, *, excused: bool) -> Move:
        after = state._replace(faults=state.faults - 1, excused=state.excused or excused)
        move = self._move(after, side, given, progress=False)
        return Move(f"{move.label} (fault)", False, move.run)

    def _move(
        self, state: CachedState, side: int, given: Given, *, progress: bool = True
    ) -> Move:
        label = f"{_NAMES[side]}: {_text(given)}"
        return Move(label, progress, lambda: self._apply(state, side, given))

    def _apply(self, state: CachedState, side: int, given: Given) -> CachedState:
        number, outputs = self._machines[side].step(state[side], given)
        sessions, readings = state.sessions, state.readings
        views = self._views(state)
        for output in outputs:
            match output:
                case "open", name, _:
                    sessions = (*sessions, Session(name, side))
                case "read", slot:
                    view = self._machines[side].views[number]
                    peer, remote = next((p, r) for s, p, r in view.reads if s == slot)
                    source = views[1 - side]
                    began = source.contents[remote] if peer == source.agent else EMPTY
                    readings = tuple(sorted((*readings, Reading(side, slot, began))))
                case _:
                    sessions = tuple(_sent(each, output) for each in sessions)
        state = state._replace(sessions=_open(sessions), readings=readings)
        return state._replace(**{_NAMES[side]: number})


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


def _crashed(session: Session, side: int, is_lost: bool) -> Session:
    """Return a session after the crash of one of its sides."""
    up, down = session.up, session.down
    if session.client == side:
        kept = () if is_lost or up is None else up
        return session._replace(down=None, up=None if up is None else (*kept, END))
    if up is None:  # an earlier epoch has ended it
        return session
    kept = () if is_lost or down is None else down
    return session._replace(up=None, down=None if down is None else (*kept, (END, "UNAVAILABLE")))


def _open(sessions: Any) -> tuple[Session, ...]:
    """Return the sessions that at least one side has not ended."""
    return tuple(each for each in sessions if each.up is not None or each.down is not None)


def _with(state: CachedState, at: int, session: Session) -> CachedState:
    sessions = (*state.sessions[:at], session, *state.sessions[at + 1 :])
    return state._replace(sessions=_open(sessions))


def _constant(state: CachedState) -> Callable[[], CachedState]:
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
