"""Breadth-first search of all reachable states, with the shortest trace to a violation."""

import gc
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tests.services.transfer.protocol.cached_calls import with_calls
from tests.services.transfer.protocol.cached_kv import CacheBounds
from tests.services.transfer.protocol.cached_world import CachedWorld
from tests.services.transfer.protocol.paged_engine import PageBounds
from tests.services.transfer.protocol.paged_workers import without_logs
from tests.services.transfer.protocol.paged_world import PagedWorld
from tests.services.transfer.protocol.parts import Bounds, Violation, replaced
from tests.services.transfer.protocol.world import Move, World

Report = Callable[[int, int], None]

_REPORT_STATES = 20_000


@dataclass
class Result:
    """Result of a search.

    Attributes:
        states: number of states, all of which were checked.
        moves: number of transitions.
        ends: number of states in which all sequences have ended and nothing is held.
        executed: number of transitions of single workers that were executed.
        complete: whether all states were reached.
        violation: the property that does not hold, or None.
        trace: what happens before the violation, in order.
    """

    states: int = 0
    moves: int = 0
    ends: int = 0
    executed: int = 0
    complete: bool = False
    violation: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.states} states, {self.moves} transitions, {self.ends} end states, "
            f"{self.executed} transitions of workers, "
            f"{'complete' if self.complete else 'not complete'}"
        ]
        if self.violation:
            steps = [f"{number:3} {label}" for number, label in enumerate(self.trace, 1)]
            lines += [f"violation: {self.violation}", *steps]
        return "\n".join(lines)


class _Found(Exception):
    def __init__(self, index: int, last: str, message: str) -> None:
        super().__init__(message)
        self.index = index
        self.last = last
        self.message = message


class Explored(Protocol):
    """A system whose states are named tuples; see `World`."""

    @property
    def executed(self) -> int: ...

    def start(self) -> Any: ...

    def close(self) -> None: ...

    def moves(self, state: Any) -> Iterator[Move]: ...

    def check(self, state: Any) -> None: ...

    def check_end(self, state: Any) -> None: ...


class Search:
    """A search of the states of a system, up to ``max_states``."""

    def __init__(self, world: Explored, max_states: int, report: Report | None = None) -> None:
        self._report = report
        self._world = world
        self._max = max_states
        self._parents = array("q")
        self._indices: dict[Any, int] = {}
        self._shared: dict[Any, Any] = {}
        self._states: list[Any] = []
        self._edges_from, self._edges_to = array("q"), array("q")  # of progress
        self._ends: list[int] = []

    def run(self) -> Result:
        """Search, and stop at the first violation."""
        result = Result()
        try:
            self._search(result)
            result.complete = result.states == len(self._states)
            self._check_liveness(result.states)
        except _Found as found:
            result.violation = found.message
            result.trace = (*self._trace(found.index), found.last)
        self._world.close()
        result.states = len(self._states)
        result.ends = len(self._ends)
        result.executed = self._world.executed
        return result

    def _search(self, result: Result) -> None:
        self._add(self._world.start(), -1)
        index = 0
        while index < len(self._states) and len(self._states) < self._max:
            state = self._states[index]
            has_progress = False
            for move in self._world.moves(state):
                result.moves += 1
                has_progress |= move.progress
                try:
                    after = move.run()
                    self._world.check(after)
                except Violation as violation:
                    raise _Found(index, move.label, str(violation)) from None
                target = self._add(after, index)
                if move.progress:
                    self._edges_from.append(index)
                    self._edges_to.append(target)
            if not has_progress:
                try:
                    self._world.check_end(state)
                except Violation as violation:
                    raise _Found(index, "nothing more happens", str(violation)) from None
                self._ends.append(index)
            index += 1
            if self._report is not None and index % _REPORT_STATES == 0:
                self._report(len(self._states), len(self._states) - index)
        result.states = index

    def _add(self, state: Any, parent: int) -> int:
        index = self._indices.get(state)
        if index is None:
            share = self._shared.setdefault  # most states differ from others in one part
            parts: tuple[Any, ...] = state
            state = type(state)(*(share(part, part) for part in parts))
            index = self._indices[state] = len(self._states)
            self._states.append(state)
            self._parents.append(parent)
        return index

    def _check_liveness(self, expanded: int) -> None:
        """Check that an end can be reached from every state, without faults.

        Args:
            expanded: number of states whose transitions are known. The others count as ends.
        """
        reaches = np.zeros(len(self._states), dtype=np.bool_)
        reaches[self._ends] = True
        reaches[expanded:] = True
        begins = np.frombuffer(self._edges_from, dtype=np.int64)
        targets = np.frombuffer(self._edges_to, dtype=np.int64)
        before = -1
        while (count := int(reaches.sum())) > before:
            before = count
            reaches[begins[reaches[targets]]] = True
        if before < len(self._states):
            raise _Found(int(np.argmin(reaches)), "...", "livelock: no end can be reached")

    def _trace(self, index: int) -> list[str]:
        labels: list[str] = []
        while index > 0:
            parent = self._parents[index]
            labels.append(self._label(parent, self._states[index]))
            index = parent
        return labels[::-1]

    def _label(self, parent: int, state: Any) -> str:
        """Return the label of a transition from a state to another."""
        for move in self._world.moves(self._states[parent]):
            try:
                if move.run() == state:
                    return move.label
            except Violation:
                continue
        raise LookupError("no transition leads to the state")


def search(
    bounds: Bounds | PageBounds | CacheBounds,
    max_states: int = 10_000_000,
    *,
    report: Report | None = None,
) -> Result:
    """Search all states, or ``max_states`` of them, nearest first.

    Args:
        report: called now and then with the number of states found and of those left.
    """
    gc.freeze()  # collections then skip the many objects of imported modules
    try:
        with replaced(), without_logs(), with_calls():
            return Search(_world_of(bounds), max_states, report).run()
    finally:
        gc.unfreeze()


def _world_of(bounds: Bounds | PageBounds | CacheBounds) -> Explored:
    match bounds:
        case PageBounds():
            return PagedWorld(bounds)
        case CacheBounds():
            return CachedWorld(bounds)
        case Bounds():
            return World(bounds)
