"""Static inputs of mixed passes, written by the host with one copy per pass.

The sequences of a pass are the prompt chunks, one sequence of padding tokens, then the decode rows.
Its rows have the same order. Passes of different shapes use leading parts of the same tensors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.attention.base import Batch, MixedBatch, SequenceSlice
from runtime.graphs.static import StaticTensors
from runtime.steps.slots import BatchSlots


class PassShape(NamedTuple):
    """Size of a pass.

    Attributes:
        rows: number of tokens, with padding.
        decoded: maximum number of decode rows.
        sampled: number of leading batch slots for which logits are computed.
    """

    rows: int
    decoded: int
    sampled: int


class PassInputs:
    """Static tensors for passes up to a maximum size.

    Args:
        size: maximum of each field of the pass shapes.
        chunks: maximum number of prompt chunks in a pass.
        slots: batch slots, from which decode rows are read.
    """

    def __init__(self, size: PassShape, chunks: int, slots: BatchSlots) -> None:
        self._chunks = chunks
        self._slots = slots
        sequences = chunks + 1 + size.decoded
        groups, _, pages = slots.page_tables.shape
        fields = {
            "tokens": ((size.rows,), torch.int64),
            "positions": ((size.rows,), torch.int64),
            "logit_rows": ((size.sampled,), torch.int64),
            "decode_slots": ((size.decoded,), torch.int64),
            "sequences": ((size.rows,), torch.int32),
            "starts": ((sequences + 1,), torch.int32),
            "lengths": ((sequences,), torch.int32),
            "decoding": ((size.decoded, 1), torch.bool),
            # Tables of the groups that prompts use. They are last, because usually few rows are
            # written.
            "page_tables": ((sequences, slots.prompt_groups, pages), torch.int32),
        }
        device = slots.page_tables.device
        self._fields = StaticTensors(fields, device)
        for group, null_page in enumerate(slots.null_pages[: slots.prompt_groups]):
            self._fields.tensors["page_tables"][chunks, group] = null_page
        self._order = torch.arange(size.decoded + 1, dtype=torch.int32, device=device)
        # Tables of the decode rows in the other groups.
        self._encoded = slots.page_tables.new_zeros(
            groups - slots.prompt_groups, size.decoded, pages
        )

    def batch(self, shape: PassShape) -> Batch:
        """Return the tensors of a pass as a batch."""
        rows, decoded, sampled = shape
        fields = self._fields.tensors
        first_decoded = self._chunks + 1
        sequences = first_decoded + decoded
        tables = fields["page_tables"][:sequences].unbind(1)
        several = len(tables) > 1
        every = Batch(
            tokens=fields["tokens"][:rows],
            positions=fields["positions"][:rows],
            page_table=tables[0],
            starts=fields["starts"][: sequences + 1],
            lengths=fields["lengths"][:sequences],
            sequences=fields["sequences"][:rows],
            logit_rows=fields["logit_rows"][:sampled],
            single=False,
            page_tables=tables if several else (),
        )
        if not decoded:
            return every
        chunks = Batch(
            tokens=every.tokens,
            positions=every.positions,
            page_table=every.page_table[:first_decoded],
            starts=every.starts[: first_decoded + 1],
            lengths=every.lengths[:first_decoded],
            sequences=every.sequences,
            logit_rows=every.logit_rows,
            single=False,
            page_tables=tuple(table[:first_decoded] for table in tables) if several else (),
        )
        of_decode = *(table[first_decoded:] for table in tables), *self._encoded[:, :decoded]
        decode = Batch(
            tokens=every.tokens[-decoded:],
            positions=every.positions[-decoded:],
            page_table=of_decode[0],
            starts=self._order[: decoded + 1],
            lengths=every.lengths[first_decoded:],
            sequences=self._order[:decoded],
            logit_rows=self._order[:decoded].long(),
            single=True,
            page_tables=of_decode if len(of_decode) > 1 else (),
        )
        decoding = fields["decoding"][:decoded]
        return MixedBatch(**vars(every), chunks=chunks, decode=decode, decoding=decoding)

    def write(
        self,
        shape: PassShape,
        pieces: Sequence[SequenceSlice],
        decoding: Sequence[int],
        completed: Sequence[tuple[int, int]],
    ) -> None:
        """Write the inputs of a pass, in stream order.

        Args:
            pieces: prompt chunks.
            decoding: the batch slot of each sequence to decode.
            completed: pairs of a batch slot and the index of the piece at whose last token the
                slot's logits are computed.
        """
        rows, decoded, sampled = shape
        first_decoded = self._chunks + 1
        tokens, positions = np.zeros((2, rows), np.int64)
        sequences = np.full(rows, self._chunks, np.int32)
        lengths = np.zeros(first_decoded + decoded, np.int32)
        starts = np.zeros(first_decoded + decoded + 1, np.int32)
        end = 0
        for index, piece in enumerate(pieces):
            start, end = end, end + len(piece.tokens)
            starts[index] = start
            tokens[start:end] = piece.tokens
            positions[start:end] = np.arange(piece.first, piece.first + end - start)
            sequences[start:end] = index
            lengths[index] = piece.first + end - start
        decode_row = rows - len(decoding)
        starts[len(pieces) : first_decoded] = end
        starts[first_decoded:] = np.maximum(decode_row, rows - decoded + np.arange(decoded + 1))
        positions[end:decode_row] = np.arange(decode_row - end)
        lengths[self._chunks] = decode_row - end
        first_used = first_decoded + decoded - len(decoding)
        sequences[decode_row:] = first_used + np.arange(len(decoding))
        slots = np.zeros(decoded, np.int64)
        valid = np.zeros((decoded, 1), np.bool_)
        slots[decoded - len(decoding) :] = decoding
        valid[decoded - len(decoding) :] = True
        logit_rows = np.zeros(sampled, np.int64)
        logit_rows[list(decoding)] = np.arange(decode_row, rows)
        for slot, index in completed:
            logit_rows[slot] = starts[index + 1] - 1
        self._fields.write(
            {
                "tokens": tokens,
                "positions": positions,
                "logit_rows": logit_rows,
                "decode_slots": slots,
                "sequences": sequences,
                "starts": starts,
                "lengths": lengths,
                "decoding": valid,
                "page_tables": self._tables_of(pieces),
            }
        )

    def _tables_of(self, pieces: Sequence[SequenceSlice]) -> NDArray[np.int32]:
        """Return the page tables of prompt chunks, `[chunks, groups, pages]`."""
        _, *shape = self._fields.tensors["page_tables"].shape
        page_tables = np.zeros((len(pieces), *shape), np.int32)
        for tables, piece in zip(page_tables, pieces, strict=True):
            for table, pages in zip(tables, (piece.pages, *piece.more_pages), strict=True):
                table[: len(pages)] = pages
        return page_tables.clip(min=0)

    def load_decode_rows(self, batch: Batch) -> None:
        """Copy tokens, positions and page tables of the decode rows from the batch slots."""
        if not isinstance(batch, MixedBatch):
            return
        slots, decode, decoding = self._slots, batch.decode, batch.decoding[:, 0]
        index = self._fields.tensors["decode_slots"][: len(decoding)]
        positions = slots.positions[index]
        torch.where(decoding, slots.tokens[index], decode.tokens, out=decode.tokens)
        torch.where(decoding, positions, decode.positions, out=decode.positions)
        decode.lengths.copy_(torch.where(decoding, positions + slots.offsets[index], 1))
        tables = decode.page_tables or (decode.page_table,)
        for table, of_slots in zip(tables, slots.page_tables, strict=True):
            torch.index_select(of_slots, 0, index, out=table)
