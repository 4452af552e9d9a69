"""Mixed passes over prompt chunks and decode rows, replayed as CUDA graphs.

A pass computes the chunks of several prompts and the next token of running sequences together, so
that weights are read once for both. Its rows are the chunks' tokens, padding, then the decode rows,
whose tokens and positions are read from the batch slots on the device. Padding tokens write to null
pages (`PagedCache.null_pages`).

A graph is captured for each shape in `pass_shapes`, at first use or by `MixedReplay.warm_up`. A
pass uses the smallest of these shapes that is large enough. If there is none, it is computed
without a graph and without padding: its launches take less time than its computation. On the CPU no
graphs are used.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from runtime.attention.base import Batch, HiddenLog, QueryLog, SequenceSlice
from runtime.core.plan import MAX_CHUNKS
from runtime.graphs.capture import captured
from runtime.kv.cache import PagedCache
from runtime.models.model import Model
from runtime.pages.plan import pages_for
from runtime.steps.pass_inputs import PassInputs, PassShape
from runtime.steps.prompts import dummy_slice
from runtime.steps.slots import BatchSlots

ROWS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Numbers of rows for which graphs are captured."""
SLOTS = (8, 64)
"""Numbers of batch slots for which graphs are captured, besides the number of all slots."""


def pass_shapes(max_rows: int, max_slots: int, *, decodes: bool) -> list[PassShape]:
    """Return the shapes for which graphs are captured, the largest first.

    There is one shape without logits, of the largest size, for steps whose chunks complete no
    prompt: such chunks fill the step.

    Args:
        max_rows: maximum number of tokens in a step.
        decodes: whether passes have decode rows.
    """
    rows = [*(size for size in ROWS if size < max_rows), min(max_rows, ROWS[-1])]
    slots = [*(size for size in SLOTS if size < max_slots), max_slots]
    pairs = [(size if decodes else 0, size) for size in slots]
    if decodes:
        pairs.append((0, slots[0]))
    shapes = [PassShape(size, *pair) for size in rows for pair in pairs if pair[0] < size]
    return sorted([*shapes, PassShape(rows[-1], 0, 0)], reverse=True)


class MixedReplay:
    """Replayed mixed passes of one model over one cache.

    Args:
        cache: KV pages, with null pages.
        logits: fp32 `[max_slots, own]`, where a pass writes the logits of each slot.
        pool: memory pool of the graphs; None on the CPU.
        max_rows: maximum number of tokens in a pass.
        decodes: whether passes have decode rows.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        slots: BatchSlots,
        logits: Tensor,
        pool: Any,
        *,
        max_rows: int,
        decodes: bool = True,
    ) -> None:
        self._model = model
        self._cache = cache
        self._slots = slots
        self._logits = logits
        self._pool = pool
        self._max_rows = max_rows
        # Positions of padding tokens must be within the model's context, too.
        padded = min(max_rows, model.context_length)
        self._shapes = pass_shapes(padded, len(logits), decodes=decodes)
        largest = PassShape(*(max(sizes) for sizes in zip(*self._shapes, strict=True)))
        self._inputs = PassInputs(largest, MAX_CHUNKS, slots)
        self._passes: dict[PassShape, Callable[[], object]] = {}

    def run(
        self,
        pieces: Sequence[SequenceSlice],
        decoding: Sequence[int] = (),
        completed: Sequence[tuple[int, int]] = (),
        queries: QueryLog | None = None,
        hidden: HiddenLog | None = None,
    ) -> None:
        """Compute the KV of prompt chunks and of running sequences, and logits of batch slots.

        Args:
            pieces: prompt chunks.
            decoding: the batch slot of each sequence to decode.
            completed: pairs of a batch slot and the index of a piece: the slot's logits are those
                of the piece's last token.
            queries: log in which the pass stores queries of the chunks' tokens. A pass with a log
                has the same shape, but is launched without a graph.
            hidden: log in which the pass stores hidden states of the chunks' tokens.
        """
        rows = sum(len(piece.tokens) for piece in pieces) + len(decoding)
        sampled = max((*decoding, *(slot for slot, _ in completed)), default=-1) + 1
        wanted = PassShape(rows, len(decoding), sampled)
        shape = self._captured_shape(wanted)
        inputs = self._inputs
        if shape is None or len(pieces) > MAX_CHUNKS:
            inputs = PassInputs(wanted, len(pieces), self._slots)
            inputs.write(wanted, pieces, decoding, completed)
            batch = replace(inputs.batch(wanted), queries=queries, hidden=hidden)
            self._compute(inputs, batch)
        else:
            inputs.write(shape, pieces, decoding, completed)
            if queries is None and hidden is None:
                self._replay(shape)
            else:
                batch = replace(inputs.batch(shape), queries=queries, hidden=hidden)
                self._compute(inputs, batch)

    def warm_up(self, progress: Callable[[int], None]) -> None:
        """Capture all graphs, the largest first, so that the others reuse its memory.

        If larger passes are possible, the largest is computed as well, without a graph. The KV of
        all passes is written to null pages.

        Args:
            progress: called with a number of rows after its graphs are captured.
        """
        if self._max_rows > self._shapes[0].rows:
            each = min(self._max_rows, self._model.context_length)
            pages = self._slots.null_pages[: self._slots.prompt_groups]
            piece = dummy_slice(each, 0, pages, pages_for(each, self._model.page_size))
            self.run([piece] * -(-self._max_rows // each))
        for index, shape in enumerate(self._shapes):
            self._inputs.write(shape, [], [], [])
            self._replay(shape)
            if shape.rows not in {other.rows for other in self._shapes[index + 1 :]}:
                progress(shape.rows)

    def _captured_shape(self, wanted: PassShape) -> PassShape | None:
        """Return the smallest shape with a graph that is large enough; None if there is none."""
        fitting = (
            shape
            for shape in reversed(self._shapes)
            if shape.rows >= wanted.rows
            and shape.decoded >= wanted.decoded
            and shape.sampled >= wanted.sampled
        )
        return next(fitting, None)

    def _replay(self, shape: PassShape) -> None:
        if shape not in self._passes:
            compute = partial(self._compute, self._inputs, self._inputs.batch(shape))
            self._passes[shape] = captured(compute, self._pool)
        self._passes[shape]()

    def _compute(self, inputs: PassInputs, batch: Batch) -> None:
        inputs.load_decode_rows(batch)
        logits = self._model.forward(batch, self._cache)
        self._logits[: len(logits)] = logits
