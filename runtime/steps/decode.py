"""Decode passes over the leading batch slots, replayed as CUDA graphs.

A graph is captured for certain numbers of leading slots (buckets, `slot_buckets`), at first use. On
the CPU the same pass runs without a graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.graphs.capture import capture, captured
from runtime.kv.cache import PagedCache
from runtime.megakernel.decode_step import decode_step
from runtime.models.model import Model
from runtime.steps.slots import BatchSlots


class DecodeReplay:
    """Replayed decode passes of one model over one cache.

    Args:
        logits: fp32 `[max_slots, own]`, where a pass writes the logits of each slot.
        pool: memory pool of the graphs; None on the CPU.
        by_layer: see `runtime.core.options.EngineOptions`.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        slots: BatchSlots,
        logits: Tensor,
        pool: Any,
        *,
        by_layer: bool = False,
    ) -> None:
        self._model = model
        self._cache = cache
        self._by_layer = by_layer
        self._slots = slots
        self._logits = logits
        self._pool = pool
        self._order = torch.arange(len(logits) + 1, device=model.device)
        self._passes: dict[int, Callable[[], object]] = {}

    def run(self, bucket: int) -> None:
        """Compute the KV of the last tokens and the logits of the first ``bucket`` slots."""
        if bucket not in self._passes:
            self._passes[bucket] = self._captured(bucket)
        self._passes[bucket]()

    def _captured(self, bucket: int) -> Callable[[], object]:
        """Capture a pass as one graph or several. The pass runs once before the capture."""
        parts = self._parts(bucket)

        def run() -> None:
            for part in parts:
                part()

        if self._pool is None or not self._by_layer:
            return captured(run, self._pool)
        run()
        parts = [capture(part, self._pool) for part in parts]
        return run

    def _parts(self, bucket: int) -> Sequence[Callable[[], object]]:
        """Return the parts of a pass, in order. With ``by_layer``, each is captured separately."""
        leading = slice(bucket)
        slots = self._slots
        batch = self._batch(bucket)
        if self._by_layer:
            *stages, logits_of = self._model.stages(batch, self._cache)
        else:
            stages = []
            logits_of = decode_step(self._model, batch, self._cache)
        return [
            lambda: torch.add(
                slots.positions[leading], slots.offsets[leading], out=slots.lengths[leading]
            ),
            *stages,
            lambda: self._logits[leading].copy_(logits_of()),
        ]

    def _batch(self, bucket: int) -> Batch:
        """Return the first ``bucket`` slots as a batch of static tensors."""
        leading = slice(bucket)
        slots = self._slots
        tables = tuple(table[leading] for table in slots.page_tables)
        return Batch(
            tokens=slots.tokens[leading],
            positions=slots.positions[leading],
            page_table=tables[0],
            starts=self._order[: bucket + 1].int(),
            lengths=slots.lengths[leading],
            sequences=self._order[leading].int(),
            logit_rows=self._order[leading],
            single=True,
            page_tables=tables if len(tables) > 1 else (),
        )
