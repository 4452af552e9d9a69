"""A decode step as one launch."""

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from runtime.attention.base import Batch
from runtime.gemm.weights import StepWeights
from runtime.megakernel.kernels import layouts
from runtime.megakernel.kernels.step import step_kernel
from runtime.megakernel.schedule import Places, passes_of

MOST = layouts.N.value
"""Sequences of a step."""
_MOST_PROGRAMS = 256
_MOST_SPLITS = 32
"""Parts of a sequence's KV that one program puts together."""


class DecodeStep:
    """The step of a batch whose tensors stay, and whose numbers change.

    Args:
        planes: K and V of all layers, bf16 `[page, kv_head, slot, dim]`, of equal strides.
        rope: cosines and sines, fp32 `[context, dim / 2]`.
        batch: at most `MOST` sequences, one token of each; its tensors are read at every launch.
        programs: that run at the same time on the device, one on a multiprocessor.
        slots: tiles of 32 KiB that a program has room for.
        ahead, tall_ahead: of these, and one more, are on their way at the same time.
        tall: rows for each program from which on tiles of narrow matrices are 128 rows tall.

    Attributes:
        batch: as it was given.
        logits: fp32 `[sequences, vocab]`, of the last launch.

    Raises:
        ValueError: for sizes that the kernel does not have.
    """

    def __init__(
        self,
        weights: StepWeights,
        planes: Sequence[Tensor],
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        *,
        programs: int,
        slots: int = 5,
        ahead: int = 1,
        tall: int = 48,
        tall_ahead: int = 2,
    ) -> None:
        config, page, size = weights.config, planes[0].shape[2], len(batch.tokens)
        if page % 16 or not 1 <= size <= MOST or not 1 <= programs <= _MOST_PROGRAMS:
            raise ValueError(f"pages of {page}, a batch of {size}, {programs} programs")
        shapes = {(plane.stride(), plane.shape[1:]) for plane in planes}
        if len(planes) != 2 * config.num_layers or len(shapes) != 1:
            raise ValueError("planes that are not K and V of every layer, laid out alike")
        device, dim = planes[0].device, config.head_dim
        self._programs = programs

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        def words(*shape: int) -> Tensor:
            return numbers(*shape, dtype=torch.int64)

        self.batch = batch
        self.logits = numbers(size, config.vocab_size)
        self._held = weights, list(planes)
        splits = min(_MOST_SPLITS, max(1, programs // (size * config.num_kv_heads)))
        places = Places.of(config, weights.inner_most)
        passes = passes_of(weights, planes, places, programs * tall)
        table = torch.tensor([one.row() for one in passes], dtype=torch.int32, device=device)
        strides = (stride // layouts.LINE.value for stride in planes[0].stride()[:2])
        self._arguments = (
            table, len(passes) - 1, numbers(_MOST_PROGRAMS, dtype=torch.int32) + 1,
            weights.head.weight, weights.vectors, weights.embedding, config.rms_norm_eps,
            batch.tokens, batch.positions, batch.lengths, batch.page_table,
            batch.page_table.stride(0), planes[0],
            *strides, *rope, numbers(size, places.end, dtype=torch.int32), places.end,
            words(size * config.num_heads * splits, layouts.MOST_DIM.value + 2),
            words(_MOST_PROGRAMS, layouts.N.value), numbers(size, config.hidden_size),
            numbers(size, config.intermediate_size), self.logits,
            math.log2(math.e) / math.sqrt(dim), places.query, places.attended,
        )  # fmt: skip
        self._options = {
            "B": size, "BL": triton.next_power_of_2(size),
            "HIDDEN": config.hidden_size, "GATED": config.intermediate_size,
            "VOCAB": config.vocab_size, "HEADS": config.num_heads,
            "KV_HEADS": config.num_kv_heads, "DIM": dim, "PAGE": page, "SPLITS": splits,
            "SLOTS": slots, "AHEAD": ahead, "TALL_AHEAD": tall_ahead,
            "num_warps": layouts.WARPS.value,
        }  # fmt: skip

    def launch(self) -> None:
        """Computes ``logits`` and writes the tokens' K and V, for what the tensors hold."""
        step_kernel[(self._programs,)](
            *self._arguments, **self._options, launch_cooperative_grid=True
        )
