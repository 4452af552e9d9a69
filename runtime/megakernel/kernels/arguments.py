# mypy: ignore-errors
"""Arguments of `step.step_kernel`, in groups.

B is the number of sequences, P the number of programs, and N = 8 the maximum number of sequences. A
line is 64 bf16 elements.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl


class Schedule(NamedTuple):
    """The list of passes (see `opcodes`), and the flags of this step.

    Attributes:
        table: int64 `[passes + 1, FIELDS]`; the last row marks the end of the list.
        passes: number of passes.
        flags: int32 `[P]`, the flag of stage 0 for each program, never 0. At its end, a launch adds
            the stage of the last row: 0 until the last launch of a step, then a number above all
            stages of the step.
    """

    table: Tensor
    passes: int
    flags: Tensor


class Weights(NamedTuple):
    """Weights of the model.

    Attributes:
        base: bf16, the tensor from which the pass table counts offsets of matrices, in lines.
        vectors: fp32 `[v]`, norms and biases.
        embedding: bf16 `[VOCAB, HIDDEN]`.
        eps: epsilon of RMSNorm.
    """

    base: Tensor
    vectors: Tensor
    embedding: Tensor
    eps: float


class Batch(NamedTuple):
    """The sequences, one new token each.

    Attributes:
        tokens: int64 `[B]`.
        positions: int64 `[B]`.
        lengths: int32 `[B]`, number of tokens of each sequence, including the new one.
        page_table: int32 `[B, pages]`.
        table_stride: row stride of ``page_table``.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    page_table: Tensor
    table_stride: int


class Pages(NamedTuple):
    """K and V of all layers, with equal strides.

    Attributes:
        base: bf16 `[page, KV_HEADS, PAGE, DIM]`, the plane from which the pass table counts offsets
            of planes, in lines.
        page_stride, head_stride: strides of a plane, in lines.
    """

    base: Tensor
    page_stride: int
    head_stride: int


class Rope(NamedTuple):
    """Cosines and sines of all positions, fp32 `[context, DIM / 2]` each."""

    cos: Tensor
    sin: Tensor


class Messages(NamedTuple):
    """Flagged messages, written by one program, or by `attended.send_kernel`, and polled by others.

    Attributes:
        activations: int32 `[B, stride]`, bf16 values with 16-bit flags. `schedule.Offsets` has the
            offset of each activation; the normed residual stream is at 0.
        stride: number of messages of one sequence.
        splits: int64 `[B, HEADS, SPLITS, MAX_DIM + 2]`, fp32 values with 32-bit flags: output,
            maximum and sum of each split of attention.
        squares: int64 `[P, N]`, fp32 values with 32-bit flags: each program's part of the sum of
            squares of the residual stream. If the ranks divide its rows, int64 `[2, RANKS, THREADS,
            N]`, with the parts of the programs of all ranks; the second half is for stage 0, see
            `schedule.Offsets.embedded`.
    """

    activations: Tensor
    stride: int
    splits: Tensor
    squares: Tensor


class Ranks(NamedTuple):
    """Memory through which the kernels of a worker's ranks exchange messages; unused by one rank.

    Attributes:
        rank: number of this rank.
        first_token: id of the first of the VOCAB tokens that this rank holds.
        partials: int64 `[5, RANKS, B, SUMS]`, fp32 values with 32-bit flags: the addends of each
            rank. The first four groups are those of `gemm.weights.PROJECTION_GROUPS`, and the last
            one (`opcodes.EMBEDDED`) is the embedding.
        partial_addresses: int64 `[RANKS]`, addresses of the ``partials`` of all ranks.
        activation_addresses, square_addresses: int64 `[RANKS]`, addresses of `Messages.activations`
            and of `Messages.squares` of all ranks.
    """

    rank: int
    first_token: int
    partials: Tensor
    partial_addresses: Tensor
    activation_addresses: Tensor
    square_addresses: Tensor


class Buffers(NamedTuple):
    """The logits, and intermediate results that are read only by the program that wrote them.

    Attributes:
        hidden: fp32 `[B, HIDDEN]`, the rows of the residual stream that this rank computes.
        gates: fp32 `[B, GATED]`, outputs of the gate projection.
        logits: fp32 `[B, VOCAB]`, written by the last pass.
    """

    hidden: Tensor
    gates: Tensor
    logits: Tensor


class Attention(NamedTuple):
    """Parameters of the attention passes.

    Attributes:
        scale: log2(e) / sqrt(DIM).
        query_offset: offset of q in a sequence's activations; new k and v follow it.
        output_offset: offset of attention's output in a sequence's activations.
    """

    scale: float
    query_offset: int
    output_offset: int


@dataclass(frozen=True)
class Shape:
    """Constexpr sizes of the model and the batch.

    Attributes:
        B: sequences; BL: the smallest power of two that is at least B.
        HIDDEN, GATED, VOCAB: hidden size; numbers of MLP features and tokens of this rank.
        HEADS, KV_HEADS, DIM: query heads, KV heads, head dimension.
        PAGE: token slots of a page.
        SPLITS: maximum number of splits of a sequence's KV. One program attends to each split.
        RANKS: number of ranks.
        SUMS: maximum number of values per sequence that the ranks add in a stage.
        HEIGHT: maximum number of rows of the residual stream that a rank computes, where the last
            ranks may have fewer or none; 0 if every rank computes all of them.
    """

    B: gl.constexpr
    BL: gl.constexpr
    HIDDEN: gl.constexpr
    GATED: gl.constexpr
    VOCAB: gl.constexpr
    HEADS: gl.constexpr
    KV_HEADS: gl.constexpr
    DIM: gl.constexpr
    PAGE: gl.constexpr
    SPLITS: gl.constexpr
    RANKS: gl.constexpr
    SUMS: gl.constexpr
    HEIGHT: gl.constexpr

    @classmethod
    def of(cls, **sizes: int) -> "Shape":
        return cls(**{name: gl.constexpr(size) for name, size in sizes.items()})

    @property
    def GROUP(self):
        """Query heads per KV head."""
        return gl.constexpr(self.HEADS.value // self.KV_HEADS.value)


@dataclass(frozen=True)
class Ring:
    """Constexpr sizes of the ring of tiles.

    Attributes:
        SLOTS: slots in shared memory, for tiles of 32 KiB.
        AHEAD, TALL_AHEAD: maximum copies in flight after one was started and waited for, for
            ordinary and for tall tiles (see `ring`).
    """

    SLOTS: gl.constexpr
    AHEAD: gl.constexpr
    TALL_AHEAD: gl.constexpr

    @classmethod
    def of(cls, **sizes: int) -> "Ring":
        return cls(**{name: gl.constexpr(size) for name, size in sizes.items()})
