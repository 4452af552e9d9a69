"""The list of a step's passes, in the order in which all programs go through them.

A pass has a stage: what it tells is of that stage, and what it reads of the stage that it is
``after``. Passes of one stage, as q, k and v, do not wait for one another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from runtime.config import ModelConfig
from runtime.gemm.weights import EIGHT, GROUPS, LINE_BYTES, LayerMatrices, Matrix, StepWeights
from runtime.megakernel.kernels import layouts
from runtime.megakernel.kernels import opcodes as kinds

HEADS = {"q": kinds.QUERY.value, "k": kinds.KEY.value, "v": kinds.VALUE.value}
_NARROW = layouts.TALLEST.value
"""Columns of a matrix at most for tiles of 128 rows: what shared memory keeps of an input."""
_BLOCK = 16
"""Rows of q, k and v of which a program has whole ones: eight, and their partners."""

Address = Callable[[Tensor], int]


@dataclass(frozen=True)
class Pass:
    """A row of the kernel's table, whose fields `kernels.step.passes` names.

    Attributes:
        kind: what is done with the product.
        offset, other: where the matrix is, or K and V, in lines from the base.
        width: of the matrix, in eights.
        start, units, total, unit: the pass has ``units`` of ``unit`` rows; programs share
            ``total``, of which its own are those from ``start`` on.
        source: where its input is among the words, in eights.
        target: where its output goes: a place among the words, or in lines the plane.
        bias, norm: places among the vectors.
        normed: the input is the normed residual stream, not yet divided by its rms.
        tall: tiles have 128 rows.
        stride: from row to row of the matrix, in eights.
    """

    kind: int
    stage: int
    after: int
    offset: int = 0
    other: int = 0
    width: int = 0
    start: int = 0
    units: int = 0
    total: int = 0
    unit: int = 1
    source: int = 0
    target: int = 0
    bias: int = -1
    norm: int = 0
    normed: bool = False
    tall: bool = False
    stride: int = 0

    def row(self) -> list[int]:
        """As int32 numbers."""
        return [int(value) for value in vars(self).values()]


@dataclass(frozen=True)
class Places:
    """Where in a sequence's words the activations are; the normed residual stream is first."""

    attended: int
    query: int
    gated: int
    inner: int
    end: int

    @classmethod
    def of(cls, config: ModelConfig, inner_most: int) -> "Places":
        heads = config.num_heads * config.head_dim
        query = config.hidden_size + heads
        gated = query + heads + 2 * config.num_kv_heads * config.head_dim
        inner = gated + config.intermediate_size
        return cls(config.hidden_size, query, gated, inner, -(-(inner + inner_most) // 16) * 16)


def passes_of(
    weights: StepWeights,
    planes: Sequence[Tensor],
    places: Places,
    tall: int,
    address: Address = Tensor.data_ptr,
) -> list[Pass]:
    """All passes of a step, and one that only says what comes after them.

    Matrices with at least ``tall`` rows, if they are narrow, have tall tiles.
    """
    writer = _Writer(weights, planes, places, tall, address)
    for number, layer in enumerate(weights.layers):
        writer.layer(number, layer)
    writer.matrix(kinds.LOGITS.value, weights.head, writer.normed_at, 0, normed=True)
    end = Pass(0, writer.stage + 1, 0, norm=weights.layers[0].input_norm)
    return [*writer.made, end]


class _Writer:
    def __init__(
        self,
        weights: StepWeights,
        planes: Sequence[Tensor],
        places: Places,
        tall: int,
        address: Address,
    ) -> None:
        self._weights, self._planes, self._places = weights, planes, places
        self._tall, self._address = tall, address
        self.made: list[Pass] = []
        self.stage = 1
        self.normed_at = 0
        """The stage that told the normed residual stream: the embedding's, at first."""

    def layer(self, number: int, layer: LayerMatrices) -> None:
        following = self._weights.layers[number + 1 :]
        next_norm = following[0].input_norm if following else self._weights.final_norm
        keys, values = (
            self._lines(plane, self._planes[0]) for plane in self._planes[2 * number :][:2]
        )
        sources = (0, self._places.attended, 0, self._places.gated)
        for names, source in zip(GROUPS, sources, strict=True):
            normed = source == 0
            told = self.normed_at if normed else self.stage - 1
            if names[0] in layer.inner:
                target = self._places.inner
                self.matrix(
                    kinds.INNER.value, layer.inner[names[0]], told, source,
                    target=target, normed=normed,
                )  # fmt: skip
                self.stage += 1
            start = 0
            for name in names:
                matrix = layer.outer[name]
                dense = matrix.first < 0
                after = told if dense else self.stage - 1
                place = source if dense else self._places.inner + matrix.first
                own = normed and dense
                if name in HEADS:
                    total = sum(len(layer.outer[other].weight) for other in names) // _BLOCK
                    target = {"q": 0, "k": keys, "v": values}[name]
                    self.matrix(
                        HEADS[name], matrix, after, place, unit=_BLOCK, start=start, total=total,
                        target=target, normed=own,
                    )  # fmt: skip
                    start += len(matrix.weight) // _BLOCK
                elif name in ("o", "down"):
                    norm = layer.post_norm if name == "o" else next_norm
                    self.matrix(kinds.RESIDUAL.value, matrix, after, place, norm=norm)
                    self.normed_at = self.stage
                else:
                    kind = kinds.GATE.value if name == "gate" else kinds.UP.value
                    self.matrix(kind, matrix, after, place, target=self._places.gated, normed=own)
            self.stage += 1
            if names == GROUPS[0]:
                attend = Pass(kinds.ATTEND.value, self.stage, self.stage - 1, keys, values)
                self.made.append(attend)
                self.stage += 1

    def matrix(
        self,
        kind: int,
        matrix: Matrix,
        after: int,
        source: int,
        *,
        unit: int = 1,
        start: int = 0,
        total: int | None = None,
        target: int = 0,
        norm: int = 0,
        normed: bool = False,
    ) -> None:
        rows, width = matrix.weight.shape
        units = rows // unit
        total = units if total is None else total
        tall = width <= _NARROW and total * unit >= self._tall and kind != kinds.RESIDUAL.value
        self.made.append(
            Pass(
                kind,
                self.stage,
                after,
                offset=self._lines(matrix.weight, self._weights.head.weight),
                width=width // EIGHT,
                start=start,
                units=units,
                total=total,
                unit=unit,
                source=source // EIGHT,
                target=target,
                bias=matrix.bias,
                norm=norm,
                normed=normed,
                tall=tall,
                stride=matrix.weight.stride(0) // EIGHT,
            )
        )

    def _lines(self, tensor: Tensor, base: Tensor) -> int:
        distance = self._address(tensor) - self._address(base)
        if distance % LINE_BYTES:
            raise ValueError(f"a tensor is not at a multiple of {LINE_BYTES} bytes")
        if abs(distance // LINE_BYTES) >= 1 << 31:
            raise ValueError("tensors are too far apart for the step's table")
        return distance // LINE_BYTES
