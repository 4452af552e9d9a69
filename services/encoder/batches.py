"""Queue of inputs, from which batches are formed by tokens: pure bookkeeping without a clock.

Time is measured in tokens that were computed. An input is due when `OVERTAKING` times the tokens of
its call, up to and including its own, have been computed since it arrived; the inputs of a call are
counted in rising length. Batches take the inputs that are due first. Therefore

- a short input precedes the long ones that arrived a little earlier, and the rest of a long list;
- an input that waits for longer than that is due before everything that arrives later, so that
  neither long inputs nor long lists starve.

Inputs are kept by length class (powers of two). A batch has inputs of the class of its first one
and of shorter classes, so that none of them waits for the computation of much longer ones. A batch
with less than `FILL` of its tokens is filled up with longer ones to that size, because a batch has
a fixed cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

OVERTAKING = 4
"""Tokens that are computed before an input at most, for each of its tokens, if they arrived later.
Larger values favour short inputs."""
FILL = 8
"""A batch of fewer tokens than this part of a full one also takes longer inputs."""

C = TypeVar("C")


@dataclass(eq=False, slots=True)
class Item(Generic[C]):
    """One input of a call.

    Attributes:
        index: index of the input in its call.
        tokens: number of its tokens.
        dropped: whether its call has ended, so that it is not computed.
    """

    call: C
    index: int
    tokens: int
    dropped: bool = False


@dataclass(slots=True)
class _Class(Generic[C]):
    """Inputs of one length class, as a heap of (due, arrival number, input)."""

    heap: list[tuple[int, int, Item[C]]] = field(default_factory=list)

    @property
    def first(self) -> tuple[int, int] | None:
        """Due time and arrival number of the first input that is not dropped; None if empty."""
        while self.heap and self.heap[0][2].dropped:
            heappop(self.heap)
        return self.heap[0][:2] if self.heap else None


class BatchQueue(Generic[C]):
    """Inputs that wait for a batch.

    Args:
        batch_tokens: tokens of a full batch. A longer input is a batch of its own.

    Attributes:
        tokens: tokens of all waiting inputs.
        waiting: number of waiting inputs.
        computed: tokens of all inputs that batches have taken.
    """

    def __init__(self, batch_tokens: int) -> None:
        self.batch_tokens = batch_tokens
        self.tokens = self.waiting = self.computed = 0
        self._arrivals = 0
        self._classes: dict[int, _Class[C]] = {}

    def add(self, call: C, lengths: Sequence[int]) -> list[Item[C]]:
        """Queue the inputs of a call; return them in their order.

        Args:
            lengths: number of tokens of each input.
        """
        items = [Item(call, index, tokens) for index, tokens in enumerate(lengths)]
        ahead = 0
        for item in sorted(items, key=lambda item: item.tokens):
            ahead += item.tokens
            self._arrivals += 1
            due = self.computed + OVERTAKING * ahead
            of_length = self._classes.setdefault(item.tokens.bit_length(), _Class())
            heappush(of_length.heap, (due, self._arrivals, item))
        self.tokens += ahead
        self.waiting += len(items)
        return items

    def drop(self, items: Sequence[Item[C]]) -> None:
        """Remove those of the inputs of a call that still wait."""
        for item in items:
            if not item.dropped:
                item.dropped = True
                self.tokens -= item.tokens
                self.waiting -= 1

    def take(self) -> list[Item[C]]:
        """Remove and return the inputs of the next batch, shortest first; empty if none wait."""
        firsts = {name: found for name, each in self._classes.items() if (found := each.first)}
        if not firsts:
            return []
        longest = min(firsts, key=lambda name: firsts[name])
        batch = [self._pop(longest)]
        size = self._fill(batch, batch[0].tokens, self.batch_tokens, range(longest + 1))
        others = range(longest + 1, 1 + max(firsts))
        self._fill(batch, size, self.batch_tokens // FILL, others)
        batch.sort(key=lambda item: item.tokens)
        return batch

    def _fill(self, batch: list[Item[C]], size: int, limit: int, names: range) -> int:
        """Add inputs of these classes while the batch has at most ``limit`` tokens.

        Returns:
            The tokens of the batch.
        """
        open_classes = [name for name in names if name in self._classes]
        while open_classes and size < limit:
            firsts = {name: self._classes[name].first for name in open_classes}
            open_classes = [name for name in open_classes if firsts[name]]
            if not open_classes:
                break
            name = min(open_classes, key=lambda name: firsts[name] or (0, 0))
            if size + self._classes[name].heap[0][2].tokens > limit:
                open_classes.remove(name)
                continue
            batch.append(self._pop(name))
            size += batch[-1].tokens
        return size

    def _pop(self, name: int) -> Item[C]:
        """Remove the first input of a class, which must have one."""
        item = heappop(self._classes[name].heap)[2]
        item.dropped = True  # it does not wait any more
        self.tokens -= item.tokens
        self.waiting -= 1
        self.computed += item.tokens
        return item
