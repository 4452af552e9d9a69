"""Products of a step's matrices with any number of tokens, by torch or by our kernels."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from runtime.gemm.epilogues import Kind, gated
from runtime.gemm.kernels.small_m import linear_kernel
from runtime.gemm.large_m import LargeLinear
from runtime.gemm.plan import KernelPlan, LargeTile, Tile
from runtime.gemm.weights import EIGHT, LINE, LINE_BYTES, Matrix, up
from runtime.layers.kernels import rms_norm_kernel

_MOST_BLOCKS = 4096
"""Of a launch that splits columns."""
_MOST_GATED = 1 << 14
"""Numbers of a tile, of which a program has two."""
_TALL = 8
"""Blocks of tokens that share rows of weights in the L2."""


class Norm:
    """RMSNorm over the last dimension; ``weight`` fp32 or bf16 `[d]`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        width = x.shape[-1]
        if len(x):
            rms_norm_kernel[(len(x),)](
                x, self._weight, y, width, self._eps,
                WIDTH=triton.next_power_of_2(width), num_warps=8,
            )  # fmt: skip
        return y


class Products:
    """One to three matrices that are multiplied at a time: `[n, in]` to `[n, sum(out)]`, in bf16.

    RESIDUAL ones are added to a residual stream, which is overwritten; of GATED ones, the first's
    SiLU times the second is what comes out. A matrix whose ``first`` is negative has the input
    itself, the others columns of ``inner``. ``biases`` fp32 `[sum(out)]`; ``whole`` has all of the
    matrices, if they lie one below the other and have the same input. What comes out of an
    ``inner`` one, other products read: each row begins a line.
    """

    def __init__(
        self,
        base: Tensor,
        matrices: Sequence[Matrix],
        plan: KernelPlan,
        kind: Kind = Kind.PLAIN,
        biases: Tensor | None = None,
        whole: Tensor | None = None,
        inner: bool = False,
    ) -> None:
        self._base, self._matrices, self._plan = base, tuple(matrices), plan
        self.kind, self._biases, self._whole = kind, biases, whole
        self.columns = max(max(m.first, 0) + m.weight.shape[1] for m in matrices)
        self._rows = [len(matrix.weight) for matrix in matrices]
        self._multiple = LINE if inner else 1
        self.shapes = tuple((len(m.weight), m.weight.shape[1]) for m in matrices)
        self.together = len({matrix.first < 0 for matrix in matrices}) == 1
        """Whether one launch can have all of them: they have one input."""
        self._places: list[int] = []
        for matrix in matrices:
            distance = matrix.weight.data_ptr() - base.data_ptr()
            if distance % LINE_BYTES:
                raise ValueError(f"a tensor is not at a multiple of {LINE_BYTES} bytes")
            self._places += [
                distance // LINE_BYTES, matrix.weight.shape[1] // EIGHT,
                matrix.weight.stride(0) // EIGHT, max(matrix.first, 0) // EIGHT, len(matrix.weight),
            ]  # fmt: skip
        self._places += [0, 1, 1, 0, 0] * (3 - len(matrices))
        self._arrived = torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=base.device)
        self._large = LargeLinear(self._matrices, biases, self._arrived)
        apart = kind is Kind.GATED and self._large.apart
        self.name = "APART" if apart else kind.name
        """Of the kind, in a kernel plan: APART is GATED, of two inputs."""

    def __call__(self, x: Tensor, inner: Tensor, hidden: Tensor | None = None) -> Tensor:
        tile = self._plan.tile(self.name, len(x), self.shapes) if self.together else None
        if isinstance(tile, LargeTile) and not x.is_cuda:
            tile = None
        if tile is None or not len(x):
            return self.by_torch(x, inner, hidden)
        return self.by_kernel(x if self._matrices[0].first < 0 else inner, hidden, tile)

    def by_torch(self, x: Tensor, inner: Tensor, hidden: Tensor | None = None) -> Tensor:
        """As `__call__`, a launch for each matrix."""
        inputs = [
            x if m.first < 0 else inner[:, m.first : m.first + m.weight.shape[1]]
            for m in self._matrices
        ]
        if hidden is not None:
            y = hidden.addmm_(inputs[0], self._matrices[0].weight.t())
        elif self._whole is not None:
            y = torch.mm(x, self._whole.t())
        else:
            y = self._empty(x, self._rows)
            outputs = torch.split(y, self._rows, dim=1)
            for own, matrix, out in zip(inputs, self._matrices, outputs, strict=True):
                torch.mm(own, matrix.weight.t(), out=out)
        if self._biases is not None:
            y.add_(self._biases)
        return gated(y) if self.kind is Kind.GATED else y

    def by_kernel(self, x: Tensor, hidden: Tensor | None, tile: Tile | LargeTile) -> Tensor:
        """As `__call__`, one launch for all, and one more for SiLU where the kernel cannot have it:
        two inputs with a large tile, too many numbers with another."""
        if isinstance(tile, LargeTile):
            apart = self._large.apart
        else:
            apart = tile.tokens * tile.rows > _MOST_GATED
        kind = Kind.PLAIN if self.kind is Kind.GATED and apart else self.kind
        rows = self._rows[:1] if kind is Kind.GATED else self._rows
        y = self._empty(x, rows) if hidden is None else hidden
        if isinstance(tile, LargeTile):
            self._large(x, y, kind, tile)
        else:
            self._by_blocks(x, y, kind, rows, tile)
        return y if kind is self.kind else gated(y)

    def _by_blocks(self, x: Tensor, y: Tensor, kind: Kind, rows: list[int], tile: Tile) -> None:
        blocks = triton.cdiv(len(x), tile.tokens) * sum(triton.cdiv(n, tile.rows) for n in rows)
        if tile.splits > 1 and (kind is Kind.GATED or blocks > _MOST_BLOCKS):
            raise ValueError(f"columns of {kind.name} in {blocks} blocks cannot be split")
        if x.stride(0) % EIGHT:
            raise ValueError(f"rows of an input are {x.stride(0)} apart, no multiple of {EIGHT}")
        parts = blocks * tile.splits * tile.tokens * tile.rows if tile.splits > 1 else 0
        linear_kernel[(blocks, tile.splits)](
            x, x.stride(0) // EIGHT, len(x), self._base, *self._places, self._biases, y, y,
            y.stride(0), torch.empty(parts, dtype=torch.float32, device=x.device), self._arrived,
            KIND=int(kind), BIAS=self._biases is not None, BM=tile.tokens, BN=tile.rows,
            BK=tile.columns, SPLITS=tile.splits, TALL=_TALL, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip

    def _empty(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        return x.new_empty(len(x), up(sum(rows), self._multiple))[:, : sum(rows)]
