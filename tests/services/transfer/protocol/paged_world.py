"""Several decode workers and one prefill worker: which of them waits for pages of another one.

Routers are not modelled. A stream may start at any time on any decode worker, and no load is too
high. This includes what any number of routers do, whatever they know, and all restarts of them. A
decode worker's estimate of its free pages, by which it requests a prompt early, is arbitrary too.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.services.transfer.protocol.machine import Given, Machine
from tests.services.transfer.protocol.paged_engine import PageBounds
from tests.services.transfer.protocol.paged_workers import PagedDecode, PagedPrefill, WorkerView
from tests.services.transfer.protocol.parts import Violation
from tests.services.transfer.protocol.world import Move

_Messages = tuple[Given, ...]


class PagedState(NamedTuple):
    """A state of the whole system.

    Attributes:
        prefill: number of the prefill worker's state.
        decodes: numbers of the decode workers' states.
        up, down: messages on their way to and from the prefill worker, for each decode worker.
        streams, wholes: number of streams and of whole requests that have started.
        cancels: number of streams that may still be cancelled.
    """

    prefill: int
    decodes: tuple[int, ...]
    up: tuple[_Messages, ...]
    down: tuple[_Messages, ...]
    streams: int
    wholes: int
    cancels: int


class PagedWorld:
    """The transitions of the system, and the properties of its states."""

    def __init__(self, bounds: PageBounds) -> None:
        self._bounds = bounds
        self._prefill: Machine[WorkerView] = Machine(lambda _: PagedPrefill(bounds))
        self._decode: Machine[WorkerView] = Machine(lambda number: PagedDecode(bounds, number))

    @property
    def executed(self) -> int:
        """Number of transitions of single workers that were executed."""
        return self._prefill.replays + self._decode.replays

    def start(self) -> PagedState:
        """Return the first state."""
        decodes = range(self._bounds.decodes)
        none: tuple[_Messages, ...] = ((),) * len(decodes)
        states = tuple(self._decode.start(number) for number in decodes)
        return PagedState(self._prefill.start(0), states, none, none, 0, 0, self._bounds.cancels)

    def close(self) -> None:
        """End all workers."""
        self._prefill.close()
        self._decode.close()

    def moves(self, state: PagedState) -> Iterator[Move]:
        """Yield the transitions that are possible in a state."""
        yield from self._arrivals(state)
        for given in self._prefill.views[state.prefill].inputs:
            yield self._move(state, None, given)
        for at, number in enumerate(state.decodes):
            for given in self._decode.views[number].inputs:
                yield self._move(state, at, given)
            if up := state.up[at]:
                yield self._move(state._replace(up=_with(state.up, at, up[1:])), None, up[0])
            if down := state.down[at]:
                yield self._move(state._replace(down=_with(state.down, at, down[1:])), at, down[0])

    def _arrivals(self, state: PagedState) -> Iterator[Move]:
        """Yield what gateways do. None of it must happen."""
        for at, number in enumerate(state.decodes):
            if state.streams < self._bounds.streams:
                after = state._replace(streams=state.streams + 1)
                for how in self._bounds.ways:
                    given = "open", f"s{after.streams}", how
                    yield self._move(after, at, given, progress=False)
            if state.cancels:
                after = state._replace(cancels=state.cancels - 1)
                for name in self._decode.views[number].open:
                    yield self._move(after, at, ("cancel", name), progress=False)
        if state.wholes < self._bounds.wholes:
            after = state._replace(wholes=state.wholes + 1)
            yield self._move(after, None, ("whole", f"w{after.wholes}"), progress=False)

    def check(self, state: PagedState) -> None:
        """Check a state.

        Raises:
            Violation: a stream has failed.
        """
        for number in state.decodes:
            if failed := self._decode.views[number].failed:
                raise Violation(failed)

    def check_end(self, state: PagedState) -> None:
        """Check a state in which nothing happens any more unless another request arrives.

        Raises:
            Violation: a request has not ended, or something is still held.
        """
        views = [self._decode.views[number] for number in state.decodes]
        views.append(self._prefill.views[state.prefill])
        if waiting := [name for view in views for name in view.open]:
            raise Violation(f"deadlock: {', '.join(waiting)} never end")
        if any(view.held for view in views):
            raise Violation("pages or tasks are still held at the end")

    def _move(
        self, state: PagedState, at: int | None, given: Given, *, progress: bool = True
    ) -> Move:
        worker = "prefill" if at is None else f"decode {at}"
        label = f"{worker}: {' '.join(str(part) for part in given)}"
        return Move(label, progress, lambda: self._apply(state, at, given))

    def _apply(self, state: PagedState, at: int | None, given: Given) -> Any:
        if at is not None:
            number, sent = self._decode.step(state.decodes[at], given)
            up = _with(state.up, at, (*state.up[at], *sent))
            return state._replace(decodes=_with(state.decodes, at, number), up=up)
        number, sent = self._prefill.step(state.prefill, given)
        down = state.down
        for message in sent:
            to = int(message[1].partition(".")[0])
            down = _with(down, to, (*down[to], message))
        return state._replace(prefill=number, down=down)


def _with(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])
