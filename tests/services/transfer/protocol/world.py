"""Two workers, their sessions, notifications and READs: which transitions are possible."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.message import Message

from headrace.v1 import prefill_pb2 as pb
from tests.services.transfer.protocol.decode_side import DecodeSide, DecodeView
from tests.services.transfer.protocol.machine import Given, Machine
from tests.services.transfer.protocol.parts import Bounds, Content, Violation
from tests.services.transfer.protocol.prefill_side import PrefillSide, PrefillView
from tests.services.transfer.protocol.state import END, OPEN, Link, State, open_links, with_link


@dataclass(frozen=True)
class Move:
    """A transition.

    Attributes:
        label: what happens.
        progress: whether it happens eventually. Faults and notifications need not happen.
        run: returns the next state.
    """

    label: str
    progress: bool
    run: Callable[[], State]


class World:
    """The transitions of the system, and the properties of its states.

    Faults, by the names in `Bounds.kinds`: "cancel" and "deadline" (of the reader), "sender
    deadline", "lease expiry", "read failed", "overdue" (drained later), "corrupted", "doubled" (a
    notification), "prefill crash" and "decode crash".
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.prefill: Machine[PrefillView] = Machine(lambda epoch: PrefillSide(bounds, epoch))
        self.decode: Machine[DecodeView] = Machine(lambda epoch: DecodeSide(bounds, epoch))

    @property
    def executed(self) -> int:
        """Number of transitions of single workers that were executed."""
        return self.prefill.replays + self.decode.replays

    def start(self) -> State:
        """Return the first state."""
        return State(self.prefill.start(1), self.decode.start(1), (), (), (), self.bounds.faults)

    def close(self) -> None:
        """End all workers."""
        self.prefill.close()
        self.decode.close()

    def moves(self, state: State) -> Iterator[Move]:
        """Yield the transitions that are possible in a state."""
        prefill, decode = self.prefill.views[state.prefill], self.decode.views[state.decode]
        yield from self._fetches(state, prefill, decode)
        yield from self._messages(state)
        for given in prefill.inputs:
            fault = given[0] if given[0] in ("lease expiry", "sender deadline") else None
            yield from self._maybe(state, fault, "prefill", given)
        for given in decode.inputs:
            fault = given[0] if given[0] in ("cancel", "deadline") else None
            yield from self._maybe(state, fault, "decode", given)
        yield from self._reads(state, prefill, decode)
        if decode.polls:
            yield from self._notifications(state, decode)
        if state.faults:
            yield from self._crashes(state, prefill, decode)

    def check_end(self, state: State) -> None:
        """Check a state in which nothing happens any more.

        Raises:
            Violation: a sequence has not ended, or something is still held.
        """
        prefill, decode = self.prefill.views[state.prefill], self.decode.views[state.decode]
        waiting = [n for n, (result, _) in enumerate(decode.results) if result in ("", "running")]
        if waiting:
            raise Violation(f"deadlock: sequences {waiting} never end")
        for side, held in (("prefill", prefill.held), ("decode", decode.held)):
            if held:
                raise Violation(f"the {side} worker still holds {held} at the end")

    def check(self, state: State) -> None:
        """Check a state.

        Raises:
            Violation: a fetch has failed without a fault.
        """
        if state.faults == self.bounds.faults:
            for number, (result, _) in enumerate(self.decode.views[state.decode].results):
                if result not in ("", "running", "done"):
                    raise Violation(f"sequence {number} {result}, without a fault")

    def _maybe(self, state: State, fault: str | None, side: str, given: Given) -> Iterator[Move]:
        """Yield an input of a worker's own, if it is not a fault that cannot happen."""
        run = self._on_prefill if side == "prefill" else self._on_decode
        label = f"{side}: {_text(given)}"
        if fault is None:
            yield Move(label, True, lambda: run(state, given))
        elif state.faults and fault in self.bounds.kinds:
            after = state._replace(faults=state.faults - 1)
            yield Move(f"{label} (fault)", False, lambda: run(after, given))

    def _fetches(self, state: State, prefill: PrefillView, decode: DecodeView) -> Iterator[Move]:
        """Sequences start in order. After a crash they may start again."""
        attempt = prefill.epoch + decode.epoch - 2
        for number, (result, epoch) in enumerate(decode.results):
            given = "fetch", number, attempt, str(prefill.epoch)
            if not result:
                yield Move(f"decode: {_text(given)}", True, _bind(self._on_decode, state, given))
                return
            if result.startswith("failed") and epoch < prefill.epoch:
                yield Move(f"decode: {_text(given)}", False, _bind(self._on_decode, state, given))

    def _messages(self, state: State) -> Iterator[Move]:
        for at, link in enumerate(state.links):
            if link.up:
                message, rest = link.up[0], link.up[1:]
                given: Given = ("command", link.name, message)
                if message == END:
                    given = ("end session", link.name)
                elif type(message) is tuple:
                    given = message
                after = None if message == END else rest
                yield Move(
                    f"prefill receives: {_text(given)}",
                    True,
                    _bind(self._on_prefill, with_link(state, at, link._replace(up=after)), given),
                )
            if link.down:
                message, rest = link.down[0], link.down[1:]
                given = ("event", link.name, message)
                if message == END:
                    given = ("end session", link.name)
                yield Move(
                    f"decode receives: {_text(given)}",
                    True,
                    _bind(self._on_decode, with_link(state, at, link._replace(down=rest)), given),
                )

    def _reads(self, state: State, prefill: PrefillView, decode: DecodeView) -> Iterator[Move]:
        began = dict(state.reading)
        for slot, peer, remote, is_overdue in decode.reads:
            name = f"READ of slot {remote} into slot {slot}"
            if peer != prefill.agent:
                yield Move(
                    f"{name}: peer lost",
                    True,
                    _bind(self._end_read, state, ("read", slot, "lost", None)),
                )
                continue
            first, now = began[slot], prefill.contents[remote]
            for content in dict.fromkeys((first, now, first._replace(kv=now.kv))):
                note = "" if content == first else ", overwritten meanwhile"
                yield Move(
                    f"{name} ends{note}",
                    True,
                    _bind(self._end_read, state, ("read", slot, "done", content)),
                )
            if state.faults:
                after = state._replace(faults=state.faults - 1)
                damaged = first._replace(kv="damaged")
                for kind, how, found in (
                    ("corrupted", "done", damaged),
                    ("read failed", "failed", None),
                    ("overdue", "overdue", None),
                ):
                    if kind not in self.bounds.kinds or (is_overdue and kind == "overdue"):
                        continue
                    given = ("read", slot, how, found)
                    run = self._on_decode if how == "overdue" else self._end_read
                    yield Move(f"{name}: {kind} (fault)", False, _bind(run, after, given))

    def _notifications(self, state: State, decode: DecodeView) -> Iterator[Move]:
        for at, (_, sender, message) in enumerate(state.notes):
            rest = state.notes[:at] + state.notes[at + 1 :]
            given = "notification", sender, message
            label = f"decode is notified: {_text(given)}"
            yield Move(label, False, _bind(self._on_decode, state._replace(notes=rest), given))
            if state.faults and "doubled" in self.bounds.kinds:
                twice = state._replace(faults=state.faults - 1)
                yield Move(
                    f"{label}, not for the last time", False, _bind(self._on_decode, twice, given)
                )

    def _crashes(self, state: State, prefill: PrefillView, decode: DecodeView) -> Iterator[Move]:
        if "prefill crash" in self.bounds.kinds:
            number = self.prefill.start(prefill.epoch + 1)
            for lost in (False, True):
                links = tuple(
                    link
                    if link.up is None and link.peer != prefill.agent
                    else link._replace(
                        up=None,
                        down=None if link.down is None else (() if lost else link.down) + (END,),
                    )
                    for link in state.links
                )
                after = state._replace(
                    prefill=number, links=open_links(links), faults=state.faults - 1
                )
                lose = ", its messages are lost" if lost else ""
                yield Move(f"prefill crashes{lose} (fault)", False, _bind(_same, after))
        if "decode crash" in self.bounds.kinds:
            number = self.decode.start(decode.epoch + 1)
            for lost in (False, True):
                links = tuple(
                    link._replace(
                        down=None,
                        up=None if link.up is None else (() if lost else link.up) + (END,),
                    )
                    if link.down is not None
                    else link
                    for link in state.links
                )
                after = state._replace(
                    decode=number,
                    links=open_links(links),
                    notes=(),
                    reading=(),
                    faults=state.faults - 1,
                )
                lose = ", its messages are lost" if lost else ""
                yield Move(f"decode crashes{lose} (fault)", False, _bind(_same, after))

    def _end_read(self, state: State, given: Given) -> State:
        reading = tuple(each for each in state.reading if each[0] != given[1])
        return self._on_decode(state._replace(reading=reading), given)

    def _on_prefill(self, state: State, given: Given) -> State:
        number, outputs = self.prefill.step(state.prefill, given)
        view = self.prefill.views[number]
        links, notes = state.links, state.notes
        for output in outputs:
            match output:
                case "event", name, message:
                    links = tuple(
                        link._replace(down=(*link.down, message))
                        if link.name == name and link.down is not None
                        else link
                        for link in links
                    )
                case "notify", receiver, sender, message:
                    if self.bounds.notifications and self._is_alive(state, receiver):
                        notes = tuple(sorted((*notes, (receiver, sender, message))))
                case "write", slot:
                    self._check_write(state, slot, view)
        return state._replace(prefill=number, links=open_links(links), notes=notes)

    def _is_alive(self, state: State, agent: str) -> bool:
        return self.decode.views[state.decode].agent == agent

    def _check_write(self, state: State, slot: int, after: PrefillView) -> None:
        """Check that no READ of a sequence that has not ended accesses a slot."""
        began = dict(state.reading)
        for landing, peer, remote, _ in self.decode.views[state.decode].reads:
            if remote == slot and peer == after.agent and began[landing].owner in after.open:
                raise Violation(
                    f"slot {slot} of the prefill worker is written to while sequence "
                    f"{began[landing].owner} is read from it"
                )

    def _on_decode(self, state: State, given: Given) -> State:
        number, outputs = self.decode.step(state.decode, given)
        prefill, reads = self.prefill.views[state.prefill], self.decode.views[number].reads
        links, reading = state.links, state.reading
        for output in outputs:
            match output:
                case "open", name, peer, agent:
                    links = (*links, Link(name, peer, ((OPEN, name, agent),), ()))
                case "command", name, message:
                    links = tuple(
                        link._replace(up=(*link.up, message))
                        if link.name == name and link.up is not None
                        else link
                        for link in links
                    )
                case "closed", name:
                    links = tuple(
                        link._replace(down=None, up=None if link.up is None else (*link.up, END))
                        if link.name == name
                        else link
                        for link in links
                    )
                case "read", slot:
                    peer, remote = next((p, r) for s, p, r, _ in reads if s == slot)
                    alive = peer == prefill.agent
                    content = prefill.contents[remote] if alive else Content(b"", "", "")
                    reading = tuple(sorted((*reading, (slot, content))))
        return state._replace(decode=number, links=open_links(links), reading=reading)


def _bind(run: Callable[..., State], *args: Any) -> Callable[[], State]:
    return lambda: run(*args)


def _same(state: State) -> State:
    return state


_MESSAGES: dict[str, type[Message]] = {"command": pb.PrefillCommand, "event": pb.PrefillEvent}


@cache
def _text(given: Given) -> str:
    """Return an input as text, with its message in words."""
    words = []
    for part in given:
        if isinstance(part, bytes):
            message = _MESSAGES.get(given[0], pb.SegmentReady)()
            message.ParseFromString(part)
            words.append(" ".join(str(message).split())[:120])
        else:
            words.append(str(part))
    return " ".join(words)
