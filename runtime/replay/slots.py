"""Batch slots of the decode step: their assignment to sequences and their static tensors.

A sequence keeps its slot while it runs. The host writes only changes: the state of a slot when a
sequence joins or leaves, and page-table entries when a sequence gets pages. The changes of a step
are written together, with one copy to the device.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.core.sequence import FREED, Sequence
from runtime.graphs.host_copy import to_device
from runtime.pages.window import SINK_PAGES


@dataclass
class _SlotState:
    """State of a sequence's slot on the device after all launched steps.

    Attributes:
        slot: index of the slot.
        tokens: length of the sequence in tokens; 0 if the whole slot must be written, because it
            never was or because its token is not the one that the next step computes.
        pages, stored: number of entries written in each page table.
    """

    slot: int
    tokens: int = 0
    pages: int = 0
    stored: int = 0


class BatchSlots:
    """A fixed number of batch slots, each assigned to a running sequence or unassigned.

    Args:
        max_slots: number of slots.
        max_pages: number of pages of a sequence of maximum length.
        null_page: id of the page that unassigned slots write to.
        has_stored: whether the KV format has stored pages.

    Attributes:
        tokens: int64 `[max_slots]`, last token of each sequence, the input of the next step.
        positions: int64 `[max_slots]`, position of that token.
        active: int64 `[max_slots]`, 1 for an assigned slot.
        offsets: int64 `[max_slots]`, 1 minus the evicted tokens of each sequence.
        state: int64 `[4, max_slots]`, the storage of ``tokens``, ``positions``, ``active`` and
            ``offsets``.
        lengths: int32 `[max_slots]`, buffer for ``positions + offsets``, see `Batch.lengths`.
        page_table: int32 `[max_slots, max_pages]`.
        stored_table: int32 `[max_slots, max_pages]`, see `Batch.stored_table`; None without stored
            pages.
    """

    def __init__(
        self,
        max_slots: int,
        max_pages: int,
        null_page: int,
        device: torch.device,
        *,
        has_stored: bool = False,
    ) -> None:
        self._max_slots, self._max_pages = max_slots, max_pages
        self.null_page, self._device = null_page, device
        self.state = torch.zeros(4, max_slots, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.active, self.offsets = self.state
        self.offsets.fill_(1)
        self.lengths = torch.ones(max_slots, dtype=torch.int32, device=device)
        self._tables = torch.zeros(
            1 + has_stored, max_slots, max_pages, dtype=torch.int32, device=device
        )
        self.page_table = self._tables[0].fill_(null_page)
        self.stored_table = self._tables[1] if has_stored else None
        self._states: dict[Sequence, _SlotState] = {}
        self._vacated: set[int] = set()  # released slots that the device still treats as active

    def extent(self, sequences: list[Sequence]) -> int:
        """Return one more than the highest slot held by these sequences; 0 if they hold none."""
        ends = (self._states[s].slot + 1 for s in sequences if s in self._states)
        return max(ends, default=0)

    def assign(self, sequences: list[Sequence], within: int) -> list[int]:
        """Assign a slot to each sequence and release the slots of all others.

        Sequences keep slots below ``within``. Sequences in higher slots move to lower ones, but
        only if none of them has a token in flight, because the host has not read that token yet.

        Returns:
            The slot of each sequence.
        """
        staying = set(sequences)
        for sequence in [s for s in self._states if s not in staying]:
            self._vacated.add(self._states.pop(sequence).slot)
        beyond = [s for s, state in self._states.items() if state.slot >= within]
        if not any(sequence.lookahead for sequence in beyond):
            self._vacated.update(self._states.pop(sequence).slot for sequence in beyond)
        taken = {state.slot for state in self._states.values()}
        free = (slot for slot in range(self._max_slots) if slot not in taken)
        for sequence in sequences:
            if sequence not in self._states:
                self._states[sequence] = _SlotState(next(free))
        return [self._states[sequence].slot for sequence in sequences]

    def update(
        self, sequences: list[Sequence], *, rewritten: Collection[Sequence] = ()
    ) -> dict[int, Sequence]:
        """Write the changes needed before a step that samples a token for each of these sequences.

        Args:
            rewritten: those of the sequences whose pages may all have changed.

        Returns:
            Mapping from slot to sequence for the slots whose whole state was rewritten, because the
            sequence joined, moved to another slot, or has tokens that no launched step sampled.
        """
        joined: dict[int, Sequence] = {}
        entries: list[int] = []  # flat indices into the page tables
        pages: list[int] = []
        for sequence in rewritten:
            self._states[sequence].tokens = 0
        for sequence in sequences:
            state, length = self._states[sequence], sequence.length
            if state.tokens != length:
                joined[state.slot] = sequence
                state.pages = state.stored = 0
            if state.pages != len(sequence.pages) or state.stored != len(sequence.stored):
                self._add_entries(state, sequence, entries, pages)
            state.tokens = 0 if sequence.forced else length + 1
        empty: list[int] = []
        if self._vacated:
            empty = sorted(self._vacated.difference(state.slot for state in self._states.values()))
            self._vacated.clear()
        entries += [slot * self._max_pages for slot in empty]
        pages += [self.null_page] * len(empty)
        rows = [
            (slot, s.tokens[-1], len(s.tokens) - 1, 1, 1 - s.evicted) for slot, s in joined.items()
        ]
        rows += [(slot, 0, 0, 0, 1) for slot in empty]
        if rows or entries:
            self._write(rows, entries, pages)
        return joined

    def did_not_advance(self, sequence: Sequence) -> None:
        """Record that a launched step could not draw a token for a sequence."""
        if sequence in self._states:
            self._states[sequence].tokens -= 1

    def advance(self, slots: list[int], tokens: Tensor) -> None:
        """Advance slots that the last step could not advance.

        Args:
            tokens: int64 `[max_slots]`, sampled tokens; only those of ``slots`` are used.
        """
        advanced = to_device(np.array(slots, np.int64), self._device)
        self.tokens[advanced] = tokens[advanced]
        self.positions[advanced] += 1

    def _add_entries(
        self, state: _SlotState, sequence: Sequence, entries: list[int], pages: list[int]
    ) -> None:
        """Add the page-table entries of a sequence that have not been written.

        Entries of freed pages are never read.
        """
        row = state.slot * self._max_pages
        entries += range(row + state.pages, row + len(sequence.pages))
        pages += [
            self.null_page if page == FREED else page for page in sequence.pages[state.pages :]
        ]
        state.pages = len(sequence.pages)
        row += self.page_table.numel() + SINK_PAGES
        entries += range(row + state.stored, row + len(sequence.stored))
        pages += sequence.stored[state.stored :]
        state.stored = len(sequence.stored)

    def _write(
        self, rows: list[tuple[int, int, int, int, int]], entries: list[int], pages: list[int]
    ) -> None:
        """Write slots and page-table entries with one copy to the device.

        Args:
            rows: a slot, its token, its position, whether it is active, and its offset, for each
                slot.
            entries: flat indices into the page tables.
            pages: page ids of these entries.
        """
        state = np.array(rows, np.int64).reshape(-1, 5).T
        words = to_device(
            np.concatenate([state.ravel(), entries, pages], dtype=np.int64), self._device
        )
        if rows:
            states = words[: state.size].view(state.shape)
            self.state.index_copy_(1, states[0], states[1:])
        if entries:
            table = words[state.size :].view(2, -1)
            self._tables.view(-1).index_copy_(0, table[0], table[1].int())
