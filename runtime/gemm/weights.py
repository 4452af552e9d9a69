"""A checkpoint's matrices as a decode step reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.checkpoint.weights import (
    Checkpoint,
    Dense,
    FactorPair,
    LayerWeights,
    Linear,
    linears_of,
)
from runtime.config import ModelConfig
from runtime.megakernel.kernels import layouts

GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Projections that share an input, and so a first product of the V of all of them."""
EIGHT = 8
"""Elements, 16 bytes: rows have multiples of it."""
LINE, LINE_BYTES = 64, 128
"""Elements and bytes, at multiples of which rows begin."""
_MOST_GROUP = 16


@dataclass(frozen=True)
class Matrix:
    """One matrix of a pass.

    Attributes:
        weight: bf16 `[rows, width]`, each row at a multiple of 128 bytes: rows that share lines of
            memory are read slower by all that multiplies many tokens.
        bias: where it is among the vectors; -1: none.
        first: where its input starts among the numbers between two factors; -1: it has the
            group's own.
    """

    weight: Tensor
    bias: int = -1
    first: int = -1


@dataclass(frozen=True)
class LayerMatrices:
    """A layer's norms, as places among the vectors, and its matrices by projection.

    ``inner`` has the V of each group of `GROUPS` that has factor pairs, by its first projection,
    one below the other; each rank starts at a multiple of eight. Dense ones that share an input are
    one below the other as well: ``stacked``, by the first.
    """

    input_norm: int
    post_norm: int
    inner: dict[str, Matrix]
    outer: dict[str, Matrix]
    stacked: dict[str, Tensor]


@dataclass(frozen=True)
class StepWeights:
    """All of a model that a step reads.

    Attributes:
        vectors: fp32, norms and biases one after the other.
        final_norm: where the last one is among them.
        embedding: bf16 `[vocab, hidden]`, contiguous.
        inner_most: numbers between two factors, at most.
    """

    config: ModelConfig
    layers: tuple[LayerMatrices, ...]
    vectors: Tensor
    final_norm: int
    embedding: Tensor
    head: Matrix
    inner_most: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, device: torch.device | str) -> "StepWeights":
        """Raises ValueError for a model whose step is not this one."""
        config = checkpoint.config
        if reason := refusal(checkpoint):
            raise ValueError(reason)
        packer = _Packer(torch.device(device), config.head_dim)
        layers = tuple(packer.layer(layer) for layer in checkpoint.layers)
        final_norm = packer.vector(checkpoint.final_norm)
        head = packer.matrix(checkpoint.lm_head)
        tied = checkpoint.embedding is checkpoint.lm_head and head.weight.is_contiguous()
        return cls(
            config=config,
            layers=layers,
            final_norm=final_norm,
            embedding=head.weight if tied else checkpoint.embedding.to(device, torch.bfloat16),
            head=head,
            vectors=torch.cat(packer.vectors),
            inner_most=packer.inner_most,
        )

    @property
    def nbytes(self) -> int:
        """Of all matrices, each of which a step reads once."""
        matrices = [self.head]
        for layer in self.layers:
            matrices += [*layer.inner.values(), *layer.outer.values()]
        return sum(matrix.weight.nbytes for matrix in matrices)


def by_halves(rows: Tensor, dim: int) -> Tensor:
    """Rows of heads `[heads * dim, …]` in the order of a step: eight of a head's first half, then
    their eight partners in RoPE, and so on."""
    blocks = rows.view(-1, 2, dim // 16, 8, *rows.shape[1:])
    return blocks.transpose(1, 2).reshape(rows.shape)


def up(number: int, multiple: int = EIGHT) -> int:
    """To a multiple."""
    return -(-number // multiple) * multiple


def refusal(checkpoint: Checkpoint) -> str | None:
    """Why the step is not that of this model; None if it is. Looks at shapes alone."""
    config = checkpoint.config
    if any(layer.q_norm is not None for layer in checkpoint.layers):
        return "norms of heads are not part of the step"
    if config.head_dim % 16 or config.head_dim > layouts.MOST_DIM.value:
        return f"heads of {config.head_dim} are not part of the step"
    if config.hidden_size % EIGHT or config.intermediate_size % EIGHT:
        return "a hidden or intermediate size that is no multiple of 8"
    pairs = (pair for layer in checkpoint.layers for _, pair in linears_of(layer))
    if any(isinstance(pair, FactorPair) and not pair.rank for pair in pairs):
        return "a factor pair of rank 0"
    if config.num_heads > _MOST_GROUP * config.num_kv_heads:
        return f"more than {_MOST_GROUP} query heads for one of K and V"
    return None


def _zeros(rows: int, width: int, device: torch.device) -> Tensor:
    """bf16, each row at a multiple of `LINE_BYTES` on any device."""
    stride = up(width, LINE)
    more = torch.zeros((rows + 1) * stride, dtype=torch.bfloat16, device=device)
    first = -more.data_ptr() % LINE_BYTES // more.itemsize
    return more[first : first + rows * stride].view(rows, stride)[:, :width]


@dataclass
class _Packer:
    device: torch.device
    dim: int
    vectors: list[Tensor] = field(default_factory=list)
    inner_most: int = EIGHT
    _numbers: int = 0

    def vector(self, values: Tensor | None) -> int:
        if values is None:
            return -1
        at = self._numbers
        self.vectors.append(values.to(self.device, torch.float32).flatten())
        self._numbers += values.numel()
        return at

    def matrix(self, weight: Tensor, bias: Tensor | None = None, first: int = -1) -> Matrix:
        weight = weight.to(self.device, torch.bfloat16)
        fits = weight.shape[1] % EIGHT == 0 and weight.stride(0) % LINE == 0
        if not fits or weight.stride(1) != 1 or weight.data_ptr() % LINE_BYTES:
            padded = _zeros(len(weight), up(weight.shape[1]), self.device)
            padded[:, : weight.shape[1]] = weight
            weight = padded
        return Matrix(weight, self.vector(bias), first)

    def layer(self, weights: LayerWeights) -> LayerMatrices:
        made = LayerMatrices(
            self.vector(weights.input_norm), self.vector(weights.post_norm), {}, {}, {}
        )
        for names in GROUPS:
            linears = {name: getattr(weights, name) for name in names}
            rows = {name: self._rows(name, linear) for name, linear in linears.items()}
            if any(isinstance(linear, FactorPair) for linear in linears.values()):
                made.inner[names[0]] = self.matrix(self._stacked(list(linears.values())))
            elif len(names) > 1:
                whole = self.matrix(torch.cat(list(rows.values()))).weight
                made.stacked[names[0]] = whole
                parts = torch.split(whole, [len(part) for part in rows.values()])
                rows = dict(zip(names, parts, strict=True))
            at = 0
            for name, linear in linears.items():
                dense = isinstance(linear, Dense)
                made.outer[name] = self.matrix(rows[name], linear.bias, -1 if dense else at)
                at += 0 if dense else up(linear.rank)
        return made

    def _rows(self, name: str, linear: Linear) -> Tensor:
        rows = linear.weight if isinstance(linear, Dense) else linear.u
        rows = rows.to(self.device, torch.bfloat16)
        return by_halves(rows, self.dim) if name in GROUPS[0] else rows

    def _stacked(self, linears: Sequence[Linear]) -> Tensor:
        """V of all factor pairs, one below the other."""
        pairs = [linear for linear in linears if isinstance(linear, FactorPair)]
        height = sum(up(pair.rank) for pair in pairs)
        self.inner_most = max(self.inner_most, height)
        stacked = torch.zeros(height, pairs[0].v.shape[1], dtype=torch.bfloat16, device=self.device)
        at = 0
        for pair in pairs:
            stacked[at : at + pair.rank] = pair.v.to(self.device)
            at += up(pair.rank)
        return stacked
