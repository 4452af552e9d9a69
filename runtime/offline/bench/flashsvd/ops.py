"""Launches the kernels: attention and MLP whose inputs are rank-space activations.

`StreamingAttention` and `StreamingFfn` are FlashSVD v1, the others v1.5. They compute in the dtype
of the weights, with fp32 sums.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import triton
from torch import Tensor

from runtime.checkpoint.weights import FactorPair
from runtime.config import EncoderConfig
from runtime.encoder.batch import RaggedBatch
from runtime.errors import RuntimeFault
from runtime.kernels.overlap import overlapped
from runtime.offline.bench.flashsvd.kernels.resident import (
    resident_attention_kernel,
    resident_ffn_kernel,
)
from runtime.offline.bench.flashsvd.kernels.streaming import (
    streaming_attention_kernel,
    streaming_ffn_kernel,
)


@dataclass(frozen=True)
class AttentionTiles:
    """Tile sizes and launch options of attention; see the kernels."""

    queries: int
    keys: int
    chunk: int
    warps: int
    stages: int


@dataclass(frozen=True)
class FfnTiles:
    """Tile sizes and launch options of the MLP; see the kernels.

    Attributes:
        ranks: BLOCK_R of `streaming_ffn_kernel`.
    """

    tokens: int
    inner: int
    warps: int
    stages: int
    ranks: int = 0
    chunk: int = 64


class StreamingAttention:
    """Attention that rebuilds K and V for each block of queries.

    Args:
        pairs: factor pairs of Q, K and V.
    """

    tiles = AttentionTiles(queries=64, keys=64, chunk=32, warps=4, stages=2)

    def __init__(self, config: EncoderConfig, pairs: Sequence[FactorPair]) -> None:
        self._heads, self._dim = config.num_heads, config.head_dim
        if self._dim < 16 or self._dim & (self._dim - 1):
            raise RuntimeFault(f"heads of {self._dim} are not supported: use a power of two")
        self._scale = math.log2(math.e) / math.sqrt(self._dim)
        self._u = [pair.u.contiguous() for pair in pairs]
        self._biases = [_bias(pair) for pair in pairs]
        self._ranks = [pair.rank for pair in pairs]

    def __call__(self, inner: Sequence[Tensor], batch: RaggedBatch) -> Tensor:
        """Return the output `[n, heads * dim]` of attention.

        Args:
            inner: ``V x`` of Q, K and V, `[n, rank]` each, with any row stride.
        """
        n, tiles = len(inner[0]), self.tiles
        out = inner[0].new_empty(n, self._heads * self._dim)
        inputs = len(batch.lengths)
        streaming_attention_kernel[(n // tiles.queries + inputs, self._heads)](
            *inner, *(p.stride(0) for p in inner), *self._u, *self._biases, *self._ranks,
            batch.starts, inputs, out, self._scale,
            HEADS=self._heads, DIM=self._dim, BLOCK_Q=tiles.queries, BLOCK=tiles.keys,
            CHUNK=tiles.chunk, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        return out


class ResidentAttention(StreamingAttention):
    """Attention that rebuilds K and V of each input once, if they fit in shared memory."""

    BLOCKS, LARGEST = 4, 512 * 64
    """Blocks of keys that the kernel supports, and elements of K of a head for which K and V in
    bf16 fit."""
    tiles = AttentionTiles(queries=128, keys=128, chunk=64, warps=8, stages=2)

    def __call__(self, inner: Sequence[Tensor], batch: RaggedBatch) -> Tensor:
        n, tiles = len(inner[0]), self.tiles
        blocks = triton.next_power_of_2(triton.cdiv(batch.longest, tiles.keys))
        if blocks > self.BLOCKS or blocks * tiles.keys * self._dim > self.LARGEST:
            return super().__call__(inner, batch)
        out = inner[0].new_empty(n, self._heads * self._dim)
        resident_attention_kernel[(self._heads, len(batch.lengths))](
            *inner, *(p.stride(0) for p in inner), *self._u, *self._biases, *self._ranks,
            batch.starts, out, self._scale,
            HEADS=self._heads, DIM=self._dim, BLOCK_Q=tiles.queries, BLOCK=tiles.keys,
            BLOCKS=blocks, CHUNK=tiles.chunk, MASKED=min(batch.lengths) < blocks * tiles.keys,
            num_warps=tiles.warps, num_stages=tiles.stages, **overlapped(out.device),
        )  # fmt: skip
        return out


class StreamingFfn:
    """The inner part of the MLP, ``V_down gelu(U_up p + b)``, which rebuilds tiles per use.

    Args:
        up, down: factor pairs of the MLP.
    """

    tiles = FfnTiles(tokens=64, inner=64, ranks=256, warps=4, stages=2)

    def __init__(self, up: FactorPair, down: FactorPair) -> None:
        self._u, self._bias, self._v = up.u.contiguous(), _bias(up), down.v.contiguous()
        self._rank, self._out_rank = up.rank, down.rank
        if len(self._u) % self.tiles.inner:
            raise RuntimeFault(f"{len(self._u)} inner activations are not supported")

    def __call__(self, p: Tensor) -> Tensor:
        """Return rank-space results `[n, rank of down]`.

        Args:
            p: ``V_up x``, `[n, rank of up]`.
        """
        n, tiles = len(p), self.tiles
        out = p.new_empty(n, self._out_rank)
        grid = triton.cdiv(n, tiles.tokens), triton.cdiv(self._out_rank, tiles.ranks)
        streaming_ffn_kernel[grid](
            p, p.stride(0), self._u, self._bias, self._v, out, n, len(self._u),
            self._rank, self._out_rank, BLOCK_N=tiles.tokens, BLOCK_I=tiles.inner,
            BLOCK_R=tiles.ranks, CHUNK=tiles.chunk, num_warps=tiles.warps,
            num_stages=tiles.stages,
        )  # fmt: skip
        return out


class ResidentFfn(StreamingFfn):
    """The same, with each tile computed once; for ranks of at most `LARGEST`."""

    LARGEST = 512
    """Ranks for which activations fit in shared memory and results in registers."""

    def __init__(self, up: FactorPair, down: FactorPair) -> None:
        super().__init__(up, down)
        self.tiles = resident_tiles(max(self._rank, self._out_rank))

    def __call__(self, p: Tensor) -> Tensor:
        n, tiles = len(p), self.tiles
        out = p.new_empty(n, self._out_rank)
        low, high = in_powers(self._rank)
        out_low, out_high = in_powers(self._out_rank)
        resident_ffn_kernel[(triton.cdiv(n, tiles.tokens),)](
            p, p.stride(0), self._u, self._bias, self._v, out, n, len(self._u),
            RANK=self._rank, LOW=low, HIGH=high,
            OUT_RANK=self._out_rank, OUT_LOW=out_low, OUT_HIGH=out_high,
            BLOCK_N=tiles.tokens, BLOCK_I=tiles.inner, num_warps=tiles.warps,
            num_stages=tiles.stages, **overlapped(p.device),
        )  # fmt: skip
        return out


def resident_tiles(rank: int) -> FfnTiles:
    """Return the tiles of `resident_ffn_kernel` for which registers and shared memory suffice."""
    if rank <= 256:
        return FfnTiles(tokens=128, inner=64, warps=8, stages=2)
    if rank <= 320:
        return FfnTiles(tokens=128, inner=32, warps=8, stages=2)
    return FfnTiles(tokens=64, inner=32, warps=8, stages=2)


def resident_ffn(up: FactorPair, down: FactorPair) -> StreamingFfn:
    """Return `ResidentFfn`, or `StreamingFfn` for larger ranks."""
    small = max(up.rank, down.rank) <= ResidentFfn.LARGEST
    return ResidentFfn(up, down) if small else StreamingFfn(up, down)


def in_powers(rank: int) -> tuple[int, int]:
    """Return two powers of two, of which the second may be 0, with a sum of at least ``rank``.

    The first is the largest that is at most ``rank``; both are at least 16, the minimum of a
    matmul.
    """
    low = max(16, 1 << (rank.bit_length() - 1))
    return low, max(16, triton.next_power_of_2(rank - low)) if rank > low else 0


def _bias(pair: FactorPair) -> Tensor:
    return pair.u.new_zeros(len(pair.u)) if pair.bias is None else pair.bias.contiguous()
