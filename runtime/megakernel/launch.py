"""Launcher of the megakernel: a decode step of up to eight sequences.

With a compressed KV format, the kernels of the format compute attention. The megakernel is then
launched once before the attention of the first layer and once after that of each layer.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from runtime.attention.base import Batch
from runtime.gemm.weights import PackedWeights
from runtime.kernels.alignment import LINE_ELEMENTS
from runtime.megakernel.kernels import arguments, layouts, opcodes
from runtime.megakernel.kernels.attended import send_kernel
from runtime.megakernel.kernels.step import step_kernel
from runtime.megakernel.schedule import (
    Offsets,
    Pass,
    build_passes,
    split_at_attention,
)
from runtime.parallel.partition import Partition
from runtime.parallel.peer_memory import PeerMemory

MAX_SEQUENCES = layouts.N.value
"""Maximum sequences of a step."""
MAX_SEQUENCES_WITHOUT_ATTENTION = 4
"""Maximum sequences of a step whose attention other kernels compute. With more, separate kernels
for everything are faster. `DecodeStep` itself accepts `MAX_SEQUENCES`."""
MAX_DENSE_SEQUENCES_OF_RANKS, MAX_SEQUENCES_OF_RANKS = 2, 4
"""Maximum sequences of a step of several ranks, without and with factor pairs. With more, separate
kernels are faster."""
_MAX_PROGRAMS = 256
Attend = Callable[[Tensor], Tensor]
"""Computes the attention of one layer, when K and V of the new tokens are in the pages. It takes
queries after RoPE, bf16 `[n, heads, dim]`, and returns bf16 `[n, heads * dim]`.
"""
_MAX_GROUP = layouts.ROWS.value
"""Maximum query heads per KV head: the rows of an attention tile."""
_SENT = 1024
"""Number of values that one program of `send_kernel` sends."""
_SUMS = opcodes.SUM_INNER.value, opcodes.SUM_RESIDUAL.value
_MAX_SPLITS = 32
"""Maximum number of splits of a sequence's KV; one program combines their results."""


def unsupported(weights: PackedWeights) -> str | None:
    """Return why the megakernel does not support a model, or None if it supports it.

    Only shapes are read, and those of all ranks, so that the ranks of a worker agree.
    `runtime.gemm.weights.unsupported` rejects models that cannot be packed, such as those with
    factor pairs of rank 0.
    """
    config = weights.config
    if weights.head_norms:
        return "the megakernel does not normalize query and key heads"
    if config.head_dim > layouts.MAX_DIM.value:
        return f"heads of {config.head_dim}: the megakernel's limit is {layouts.MAX_DIM.value}"
    for heads, kv_heads in _heads_of_ranks(weights):
        if heads > _MAX_GROUP * kv_heads:
            return (
                f"{heads} query heads for {kv_heads} KV heads: the megakernel's limit is "
                f"{_MAX_GROUP} for each"
            )
    return None


def _heads_of_ranks(weights: PackedWeights) -> list[tuple[int, int]]:
    """Return the numbers of query heads and of KV heads of each rank."""
    config, own = weights.config, weights.partition
    if own is None or config.whole is None:
        return [(config.num_heads, config.num_kv_heads)]
    parts = (Partition.of(config.whole, rank, own.size, own.scheme) for rank in range(own.size))
    return [(len(part.heads), len(part.kv_heads)) for part in parts]


def most_sequences(weights: PackedWeights, ranks: int, *, attends: bool) -> int:
    """Return the largest number of sequences of a step for which the megakernel is used.

    Args:
        attends: whether the megakernel computes attention.
    """
    limits = [MAX_SEQUENCES if attends else MAX_SEQUENCES_WITHOUT_ATTENTION]
    if ranks > 1:
        pairs = any(layer.inner for layer in weights.layers)
        limits.append(MAX_SEQUENCES_OF_RANKS if pairs else MAX_DENSE_SEQUENCES_OF_RANKS)
    return min(limits)


class DecodeStep:
    """A decode step over fixed tensors, whose contents may change between launches.

    Args:
        planes: K and V of all layers, bf16 `[page, kv_head, slot, dim]`, with equal strides.
        rope: cosines and sines, fp32 `[context, dim / 2]` each.
        batch: at most `MAX_SEQUENCES` sequences with one token each; every launch reads its
            tensors.
        attend: computes the attention of each layer; None if the megakernel computes it.
        memory: memory through which the ranks of the worker exchange messages; None for one rank.
            All ranks must construct and launch the same steps in the same order.
        first_token: id of the first token whose row of the vocabulary this rank holds.
        programs: number of programs, the same on all ranks. All must be resident, so at most one
            per multiprocessor.
        slots: slots of the ring in shared memory, 32 KiB each.
        ahead, tall_ahead: maximum copies in flight after one was started and waited for, for
            ordinary and for tall tiles (see `kernels.ring`).
        tall: minimum number of rows per program for which narrow matrices use tall tiles.

    Attributes:
        batch: the batch that was passed to the constructor.
        logits: logits of the tokens of this rank, fp32 `[sequences, own]`, overwritten by every
            launch.

    Raises:
        ValueError: the kernel does not support the model or the sizes.
    """

    def __init__(
        self,
        weights: PackedWeights,
        planes: Sequence[Tensor],
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        *,
        attend: Sequence[Attend] = (),
        memory: PeerMemory | None = None,
        first_token: int = 0,
        programs: int,
        slots: int = 5,
        ahead: int = 1,
        tall: int = 48,
        tall_ahead: int = 2,
    ) -> None:
        _check(weights, planes, batch, programs)
        config = weights.config
        size = len(batch.tokens)
        device = planes[0].device
        splits = min(_MAX_SPLITS, max(1, programs // (size * config.num_kv_heads)))
        rank, ranks = (0, 1) if memory is None else (memory.rank, memory.size)
        offsets = Offsets.of(weights, ranks)
        passes = build_passes(weights, planes, offsets, programs * tall, rank=rank, ranks=ranks)
        lists, stages = split_at_attention(passes) if attend else ([passes], [])
        flags = torch.ones(_MAX_PROGRAMS, dtype=torch.int32, device=device)
        self._schedules = [_schedule(each, flags) for each in lists]
        self._attend = list(zip(attend, stages, strict=True))
        self.batch = batch
        self.logits = torch.zeros(size, len(weights.lm_head.weight), device=device)
        self._programs = programs
        self._held = weights, list(planes)  # the pass table has offsets to them
        self._offsets = offsets
        self._head = (config.num_heads, config.head_dim)
        sums = max([config.hidden_size, *(one.units for one in passes if one.opcode in _SUMS)])
        rows = weights.residual_rows
        divides_rows = rows is not None
        sent, exchanged = _exchange(
            memory, first_token, (size, offsets.end, sums), device, divides_rows=divides_rows
        )
        self._messages, *constant = _workspace(weights, offsets, splits, sent, self.logits)
        self._flags = flags
        self._arguments = (
            *_inputs(weights, planes, rope, batch),
            self._messages,
            *constant,
            exchanged,
        )
        self._constants = {
            "SHAPE": arguments.Shape.of(
                B=size, BL=triton.next_power_of_2(size), HIDDEN=config.hidden_size,
                GATED=config.intermediate_size, VOCAB=self.logits.shape[1],
                HEADS=config.num_heads, KV_HEADS=config.num_kv_heads, DIM=config.head_dim,
                PAGE=planes[0].shape[2], SPLITS=splits, RANKS=ranks, SUMS=sums,
                HEIGHT=0 if rows is None else rows.height,
            ),
            "RING": arguments.Ring.of(SLOTS=slots, AHEAD=ahead, TALL_AHEAD=tall_ahead),
        }  # fmt: skip

    def launch(self) -> Tensor:
        """Compute and return ``logits``, and write K and V of the new tokens into the pages."""
        first, *others = self._schedules
        self._launch(first)
        for schedule, (attend, stage) in zip(others, self._attend, strict=True):
            self._send(attend(self._queries()), stage)
            self._launch(schedule)
        return self.logits

    def _launch(self, schedule: arguments.Schedule) -> None:
        """Run the passes of a schedule."""
        step_kernel[(self._programs,)](
            schedule, *self._arguments, **self._constants, num_warps=layouts.WARPS.value,
            launch_cooperative_grid=True,
        )  # fmt: skip

    def _queries(self) -> Tensor:
        """Return the queries that the last launch has sent; see `Attend`."""
        heads, dim = self._head
        first = self._offsets.query
        words: Tensor = self._messages.activations[:, first : first + heads * dim]
        return words.to(torch.int16).view(torch.bfloat16).view(-1, heads, dim)

    def _send(self, attended: Tensor, stage: int) -> None:
        """Send the output of attention to the next launch, as messages of its stage."""
        size, messages = attended.shape[1], self._messages
        send_kernel[(len(attended), triton.cdiv(size, _SENT))](
            attended, messages.activations, messages.stride, self._offsets.attended, self._flags,
            stage, SIZE=size, BLOCK=_SENT,
        )  # fmt: skip


def _schedule(passes: Sequence[Pass], flags: Tensor) -> arguments.Schedule:
    """Return the kernel argument for passes that end with a marker."""
    table = torch.tensor([one.row() for one in passes], device=flags.device)
    return arguments.Schedule(table, len(passes) - 1, flags)


def _check(weights: PackedWeights, planes: Sequence[Tensor], batch: Batch, programs: int) -> None:
    """Raise ValueError for models and sizes that the kernel does not support."""
    if reason := unsupported(weights):
        raise ValueError(reason)
    page = planes[0].shape[2]
    size = len(batch.tokens)
    if page % 16 or not 1 <= size <= MAX_SEQUENCES or not 1 <= programs <= _MAX_PROGRAMS:
        raise ValueError(f"unsupported: pages of {page}, {size} sequences, {programs} programs")
    shapes = {(plane.stride(), plane.shape[1:]) for plane in planes}
    if len(planes) != 2 * weights.config.num_layers or len(shapes) != 1:
        raise ValueError("planes must be K and V of every layer, with equal strides")


def _inputs(
    weights: PackedWeights, planes: Sequence[Tensor], rope: tuple[Tensor, Tensor], batch: Batch
) -> tuple[Any, ...]:
    """Return the kernel arguments for existing tensors: weights, batch, pages and RoPE tables."""
    page_stride, head_stride = (stride // LINE_ELEMENTS for stride in planes[0].stride()[:2])
    return (
        arguments.Weights(
            weights.lm_head.weight, weights.vectors, weights.embedding, weights.config.rms_norm_eps
        ),
        arguments.Batch(
            batch.tokens, batch.positions, batch.lengths, batch.page_table,
            batch.page_table.stride(0),
        ),
        arguments.Pages(planes[0], page_stride, head_stride),
        arguments.Rope(*rope),
    )  # fmt: skip


def _workspace(
    weights: PackedWeights,
    offsets: Offsets,
    splits: int,
    sent: tuple[Tensor, Tensor],
    logits: Tensor,
) -> tuple[Any, ...]:
    """Return the other kernel arguments: newly allocated messages and buffers, and constants.

    Args:
        sent: activations and squares of `arguments.Messages`.
    """
    config = weights.config
    size = len(logits)
    partial_rows = size * config.num_heads * splits

    def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*sizes, dtype=dtype, device=logits.device)

    return (
        arguments.Messages(
            activations=sent[0],
            stride=offsets.end,
            splits=zeros(partial_rows, layouts.MAX_DIM.value + 2, dtype=torch.int64),
            squares=sent[1],
        ),
        arguments.Buffers(
            hidden=zeros(size, config.hidden_size),
            gates=zeros(size, config.intermediate_size),
            logits=logits,
        ),
        arguments.Attention(
            math.log2(math.e) / math.sqrt(config.head_dim), offsets.query, offsets.attended
        ),
    )


def _exchange(
    memory: PeerMemory | None,
    first_token: int,
    sizes: tuple[int, int, int],
    device: torch.device,
    *,
    divides_rows: bool,
) -> tuple[tuple[Tensor, Tensor], arguments.Ranks]:
    """Allocate the messages that other ranks may write.

    Args:
        sizes: number of sequences, activations per sequence, and sums per sequence.
        divides_rows: whether the ranks divide the rows of the residual stream.

    Returns:
        Activations and squares of `arguments.Messages`; and `arguments.Ranks`.
    """
    sequences, stride, sums = sizes
    squares = 1, 1, _MAX_PROGRAMS, layouts.N.value
    if memory is None:
        activations = torch.zeros(sequences, stride, dtype=torch.int32, device=device)
        own = torch.zeros(squares, dtype=torch.int64, device=device)
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        return (activations, own), arguments.Ranks(0, 0, *[nothing] * 4)
    if divides_rows:
        squares = 2, memory.size, _MAX_PROGRAMS, layouts.N.value
    shared = memory.zeros(sequences, stride, dtype=torch.int32)
    groups = opcodes.EMBEDDED.value + 1
    partials = memory.zeros(groups, memory.size, sequences, sums, dtype=torch.int64)
    squared = memory.zeros(*squares, dtype=torch.int64)
    return (shared.own, squared.own), arguments.Ranks(
        memory.rank, first_token, partials.own, partials.addresses, shared.addresses,
        squared.addresses,
    )  # fmt: skip
