"""States of live workers that cannot be copied: each is known by the inputs that lead to it."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from tests.services.transfer.protocol.parts import Violation

Given = tuple[Any, ...]
V_co = TypeVar("V_co", covariant=True)
V = TypeVar("V")

_MAX_LIVE = 2000  # workers kept, about 100 KB each


class Worker(Protocol[V_co]):
    """A worker whose behaviour depends on its inputs alone."""

    def apply(self, given: Given) -> tuple[Given, ...]:
        """Process an input; return the outputs."""
        ...

    def view(self) -> V_co:
        """Return what the search sees."""
        ...

    def fingerprint(self) -> bytes:
        """Return a digest of the whole state."""
        ...

    def discard(self) -> None:
        """End all tasks; nothing is checked any more."""
        ...


class Machine(Generic[V]):
    """Numbers the states of a worker and executes each of its transitions once.

    The state after an input is found by a replay: a new worker gets all inputs that led to the
    state, then this one. States with equal fingerprints are one state.

    Args:
        boot: returns a new worker of an epoch.

    Attributes:
        views: what the search sees, by state.
        replays: number of transitions that were executed.
    """

    def __init__(self, boot: Callable[[int], Worker[V]]) -> None:
        self._boot = boot
        self._starts: dict[int, int] = {}
        self._numbers: dict[bytes, int] = {}
        self._origins: list[tuple[int, Given]] = []
        self._next: dict[tuple[int, Given], tuple[int, tuple[Given, ...]]] = {}
        self._live: dict[int, Worker[V]] = {}  # workers to go on with, oldest first
        self.views: list[V] = []
        self.replays = 0

    def start(self, epoch: int) -> int:
        """Return the first state of an epoch."""
        if epoch not in self._starts:
            worker = self._boot(epoch)
            self._starts[epoch] = self._number(worker, -1, (epoch,))
            worker.discard()
        return self._starts[epoch]

    def step(self, state: int, given: Given) -> tuple[int, tuple[Given, ...]]:
        """Return the state after an input, and the outputs.

        Raises:
            Violation: the worker has failed.
        """
        found = self._next.get((state, given))
        if found is None:
            found = self._next[state, given] = self._execute(state, given)
        return found

    def close(self) -> None:
        """End the workers that are kept."""
        for worker in self._live.values():
            worker.discard()
        self._live.clear()

    def _execute(self, state: int, given: Given) -> tuple[int, tuple[Given, ...]]:
        worker = self._at(state)
        self.replays += 1
        try:
            outputs = worker.apply(given)
        except Violation:
            worker.discard()
            raise
        known = len(self.views)
        number = self._number(worker, state, given)
        if number < known:
            worker.discard()
            return number, outputs
        self._live[number] = worker
        if len(self._live) > _MAX_LIVE:
            self._live.pop(next(iter(self._live))).discard()
        return number, outputs

    def _at(self, state: int) -> Worker[V]:
        """Return a worker in a state."""
        live = self._live.pop(state, None)
        if live is not None:
            return live
        inputs: list[Given] = []
        while state >= 0:
            state, given = self._origins[state]
            inputs.append(given)
        worker = self._boot(inputs.pop()[0])
        while inputs:
            worker.apply(inputs.pop())
        return worker

    def _number(self, worker: Worker[V], parent: int, given: Given) -> int:
        number = self._numbers.setdefault(worker.fingerprint(), len(self._origins))
        if number == len(self._origins):
            self._origins.append((parent, given))
            self.views.append(worker.view())
        return number
