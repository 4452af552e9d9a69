"""Who sits in which row of a step's tensors, and what the host writes into them.

A sequence keeps its row for as long as it runs. What changes, a row when somebody joins or leaves,
a page table when a page is given, is collected and written by one copy and one launch of each kind.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.core.sequence import Sequence
from runtime.graphs.host_copy import to_device


@dataclass
class _Seat:
    """What a row's tensors hold of a sequence once what is launched has run."""

    row: int
    tokens: int
    pages: int


class Rows:
    """``most`` rows, each of a sequence or of nobody.

    Args:
        width: pages of the longest sequence.
        nowhere: the page that nobody's rows write into.

    Attributes:
        tokens: int64 `[most]`, the last one of each sequence.
        positions: int64 `[most]`, of that token.
        active: int64 `[most]`, 1 where somebody sits.
        lengths: int32 `[most]`, room for the positions and one.
        page_table: int32 `[most, width]`.
    """

    def __init__(self, most: int, width: int, nowhere: int, device: torch.device) -> None:
        self.most, self._width, self._nowhere, self._device = most, width, nowhere, device
        self.state = torch.zeros(3, most, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.active = self.state
        self.lengths = torch.ones(most, dtype=torch.int32, device=device)
        self.page_table = torch.full((most, width), nowhere, dtype=torch.int32, device=device)
        self._seats: dict[Sequence, _Seat] = {}
        self._left: set[int] = set()  # rows that the device still takes for somebody's

    def last(self, sequences: list[Sequence]) -> int:
        """How many rows it takes to hold those of them that have one where they are."""
        rows = (self._seats[s].row + 1 for s in sequences if s in self._seats)
        return max(rows, default=0)

    def seat(self, sequences: list[Sequence], within: int) -> list[int]:
        """A row for each, and for nobody else: those that have one the same.

        Where rows are not among the first ``within``, they move there, unless one of them has a
        token that only the device knows.
        """
        staying = set(sequences)
        for sequence in [s for s in self._seats if s not in staying]:
            self._left.add(self._seats.pop(sequence).row)
        behind = [s for s, seat in self._seats.items() if seat.row >= within]
        if not any(sequence.ahead for sequence in behind):
            self._left.update(self._seats.pop(sequence).row for sequence in behind)
        taken = {seat.row for seat in self._seats.values()}
        free = (row for row in range(self.most) if row not in taken)
        for sequence in sequences:
            if sequence not in self._seats:
                self._seats[sequence] = _Seat(next(free), 0, 0)
        return [self._seats[sequence].row for sequence in sequences]

    def write(self, sequences: list[Sequence]) -> dict[int, Sequence]:
        """Bring rows up to date for a step of these; it moves each on by one token.

        Returns:
            Those that were written anew, by their rows: they joined, moved, or went on elsewhere.
        """
        joined: dict[int, Sequence] = {}
        slots: list[int] = []
        pages: list[int] = []
        for sequence in sequences:
            seat, length, num_pages = self._seats[sequence], sequence.length, len(sequence.pages)
            if seat.tokens != length:
                joined[seat.row] = sequence
                seat.pages = 0
            if seat.pages != num_pages:
                row = seat.row * self._width
                slots += range(row + seat.pages, row + num_pages)
                pages += sequence.pages[seat.pages :]
                seat.pages = num_pages
            seat.tokens = length + 1
        if joined or self._left:
            empty = sorted(self._left.difference(seat.row for seat in self._seats.values()))
            self._left.clear()
            slots += [row * self._width for row in empty]
            pages += [self._nowhere] * len(empty)
            self._write_state(joined, empty)
        if slots:
            words = to_device(np.array([slots, pages], np.int64), self._device)
            self.page_table.view(-1).index_copy_(0, words[0], words[1].int())
        return joined

    def stood_still(self, sequence: Sequence) -> None:
        """A step did not move it on after all."""
        if sequence in self._seats:
            self._seats[sequence].tokens -= 1

    def move(self, rows: list[int], tokens: Tensor) -> None:
        """Rows of the last step that stood still go on, each to its one of ``tokens`` `[most]`."""
        moved = to_device(np.array(rows, np.int64), self._device)
        self.tokens[moved] = tokens[moved]
        self.positions[moved] += 1

    def _write_state(self, joined: dict[int, Sequence], empty: list[int]) -> None:
        state = [(row, s.tokens[-1], len(s.tokens) - 1, 1) for row, s in joined.items()]
        state += [(row, 0, 0, 0) for row in empty]
        words = to_device(np.array(state, np.int64).T.copy(), self._device)
        self.state.index_copy_(1, words[0], words[1:])
