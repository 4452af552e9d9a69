"""Batch slots of the decode step: their assignment to sequences and their static tensors.

A sequence keeps its slot while it runs. The host writes only changes: the state of a slot when a
sequence joins or leaves, and page-table entries when a sequence gets pages. The changes of a step
are written together, with one copy to the device.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from runtime.core.sequence import FREED, SequenceState
from runtime.graphs.host_copy import to_device


@dataclass
class _SlotState:
    """State of a sequence's slot on the device after all launched steps.

    Attributes:
        slot: index of the slot.
        tokens: length of the sequence in tokens, or 0 if the host must write the whole slot: the
            slot was never written, or its token is not the input of the next step.
        pages: number of entries written in the first page table.
        more: number of entries written in each of the other page tables, by page group.
    """

    slot: int
    tokens: int = 0
    pages: int = 0
    more: list[int] = field(default_factory=list)


class BatchSlots:
    """A fixed number of batch slots, each assigned to a running sequence or unassigned.

    Sequences are identified by `SequenceState.arrival`, so each step may pass other copies.

    Args:
        max_slots: number of slots.
        max_pages: number of pages of a sequence of maximum length.
        null_pages: for each page group, id of the page that unassigned slots write to.
        prompt_groups: number of page groups that prompts use, see `PagePlan.prompt_groups`.

    Attributes:
        tokens: int64 `[max_slots]`, last token of each sequence, the input of the next step.
        positions: int64 `[max_slots]`, position of that token.
        active: int64 `[max_slots]`, 1 for an assigned slot.
        offsets: int64 `[max_slots]`, 1 minus the evicted tokens of each sequence.
        state: int64 `[4, max_slots]`, the storage of ``tokens``, ``positions``, ``active`` and
            ``offsets``.
        lengths: int32 `[max_slots]`, buffer for ``positions + offsets``, see `Batch.lengths`.
        page_tables: int32 `[groups, max_slots, max_pages]`, see `Batch.page_tables`.
    """

    def __init__(
        self,
        max_slots: int,
        max_pages: int,
        null_pages: tuple[int, ...],
        device: torch.device,
        *,
        prompt_groups: int = 1,
    ) -> None:
        self._max_slots = max_slots
        self._max_pages = max_pages
        self.null_pages = null_pages
        self.prompt_groups = prompt_groups
        self.state = torch.zeros(4, max_slots, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.active, self.offsets = self.state
        self.offsets.fill_(1)
        self.lengths = torch.ones(max_slots, dtype=torch.int32, device=device)
        nulls = torch.tensor(null_pages, dtype=torch.int32, device=device)
        self.page_tables = nulls[:, None, None].repeat(1, max_slots, max_pages)
        # States of sequences with a slot, by `SequenceState.arrival`.
        self._states: dict[int, _SlotState] = {}
        # Released slots that the device still treats as active.
        self._vacated: set[int] = set()

    def extent(self, sequences: list[SequenceState]) -> int:
        """Return one more than the highest slot held by these sequences; 0 if they hold none."""
        states = (self._states.get(sequence.arrival) for sequence in sequences)
        return max((state.slot + 1 for state in states if state), default=0)

    def assign(self, sequences: list[SequenceState], within: int) -> list[int]:
        """Assign a slot to each sequence and release the slots of all others.

        Sequences keep slots below ``within``. Sequences in higher slots move to lower ones, but
        only if none of them has a token in flight, because the host has not read that token yet.

        Returns:
            The slot of each sequence.
        """
        lookahead = {sequence.arrival: sequence.lookahead for sequence in sequences}
        for key in [key for key in self._states if key not in lookahead]:
            self._vacated.add(self._states.pop(key).slot)
        beyond = [key for key, state in self._states.items() if state.slot >= within]
        if not any(lookahead[key] for key in beyond):
            self._vacated.update(self._states.pop(key).slot for key in beyond)
        taken = {state.slot for state in self._states.values()}
        free = (slot for slot in range(self._max_slots) if slot not in taken)
        for key in lookahead:
            if key not in self._states:
                self._states[key] = _SlotState(next(free))
        return [self._states[key].slot for key in lookahead]

    def update(
        self, sequences: list[SequenceState], *, rewritten: Collection[SequenceState] = ()
    ) -> dict[int, SequenceState]:
        """Write the changes needed before a step that samples a token for each of these sequences.

        Args:
            rewritten: those of ``sequences`` of which any page may have changed.

        Returns:
            Sequence of each slot whose whole state was written: the sequence joined, moved to
            another slot, is in ``rewritten``, or has tokens that no launched step sampled.
        """
        joined: dict[int, SequenceState] = {}
        several = len(self.null_pages) > 1
        entries: list[int] = []
        pages: list[int] = []
        for sequence in rewritten:
            self._states[sequence.arrival].tokens = 0
        for sequence in sequences:
            state, length = self._states[sequence.arrival], sequence.length
            if state.tokens != length:
                joined[state.slot] = sequence
                state.pages = 0
                state.more = [0] * (len(self.null_pages) - 1)
            tables = sequence.page_tables
            if tables and state.pages != len(tables[0]):
                self._add_entries(state.slot, 0, state.pages, tables[0], entries, pages)
                state.pages = len(tables[0])
            if several:
                for at, table in enumerate(tables[1:]):
                    if state.more[at] != len(table):
                        written = state.more[at]
                        self._add_entries(state.slot, at + 1, written, table, entries, pages)
                        state.more[at] = len(table)
            state.tokens = 0 if sequence.forced else length + 1
        empty: list[int] = []
        if self._vacated:
            empty = sorted(self._vacated.difference(state.slot for state in self._states.values()))
            self._vacated.clear()
        for slot in empty:
            for group, null_page in enumerate(self.null_pages):
                entries.append(self._row(group, slot))
                pages.append(null_page)
        rows = [
            (slot, s.tokens[-1], len(s.tokens) - 1, 1, 1 - s.evicted) for slot, s in joined.items()
        ]
        rows += [(slot, 0, 0, 0, 1) for slot in empty]
        if rows or entries:
            self._write(rows, entries, pages)
        return joined

    def did_not_advance(self, sequence: SequenceState) -> None:
        """Record that a launched step could not draw a token for a sequence."""
        if state := self._states.get(sequence.arrival):
            state.tokens -= 1

    def advance(self, slots: list[int], tokens: Tensor) -> None:
        """Advance slots that the last step did not advance, because it could not draw their tokens.

        Args:
            tokens: int64 `[max_slots]`, tokens drawn after that step; only those of ``slots`` are
                used.
        """
        advanced = to_device(np.array(slots, np.int64), self.state.device)
        self.tokens[advanced] = tokens[advanced]
        self.positions[advanced] += 1

    def _row(self, group: int, slot: int) -> int:
        """Return the flat index of a slot's first entry in a page table."""
        return (group * self._max_slots + slot) * self._max_pages

    def _add_entries(
        self,
        slot: int,
        group: int,
        written: int,
        table: list[int],
        entries: list[int],
        pages: list[int],
    ) -> None:
        """Add the entries of a sequence's page table after the first ``written`` ones.

        Pages that the group does not hold are replaced by the null page; they are never read.

        Args:
            table: page table of the sequence in the group.
            entries: list to extend with flat indices into the page tables.
            pages: list to extend with the page ids of these entries.
        """
        row = self._row(group, slot)
        null_page = self.null_pages[group]
        entries += range(row + written, row + len(table))
        pages += [null_page if page == FREED else page for page in table[written:]]

    def _write(
        self, rows: list[tuple[int, int, int, int, int]], entries: list[int], pages: list[int]
    ) -> None:
        """Write slots and page-table entries with one copy to the device.

        Args:
            rows: (slot, token, position, active, offset) of each slot, see the attributes of
                `BatchSlots`.
            entries: flat indices into the page tables.
            pages: page ids of these entries.
        """
        state = np.array(rows, np.int64).reshape(-1, 5).T
        words = to_device(
            np.concatenate([state.ravel(), entries, pages], dtype=np.int64), self.state.device
        )
        if rows:
            states = words[: state.size].view(state.shape)
            self.state.index_copy_(1, states[0], states[1:])
        if entries:
            table = words[state.size :].view(2, -1)
            self.page_tables.view(-1).index_copy_(0, table[0], table[1].int())
