"""The pass list of a decode step, in the order in which every program runs it.

Each pass belongs to a stage. Its messages carry the flag of that stage, and it reads messages of
stage ``after``. Passes of one stage, such as those of q, k and v, do not wait for one another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from runtime.gemm.weights import PROJECTION_GROUPS, PackedLayer, PackedMatrix, PackedWeights
from runtime.kernels.alignment import LINE_BYTES, VECTOR_ELEMENTS, round_up
from runtime.megakernel.kernels import layouts, opcodes

HEAD_OPCODES = {"q": opcodes.QUERY.value, "k": opcodes.KEY.value, "v": opcodes.VALUE.value}
_MAX_TALL_WIDTH = layouts.SHARED_COLUMNS.value
"""Maximum columns of a matrix with tall tiles: its whole input must fit into shared memory."""
_FIRST = tuple(names[0] for names in PROJECTION_GROUPS)
_RESIDUAL_GROUPS = ("o", "down")
"""Groups that write the residual stream."""
_HEAD_UNIT = 16
"""Rows of q, k and v that one program computes together: eight, and their RoPE partners."""

Address = Callable[[Tensor], int]
"""Returns the byte address of a tensor."""


@dataclass(frozen=True)
class Pass:
    """A row of the pass table. The fields are in the order of the columns in `kernels.opcodes`.

    Attributes:
        opcode: attention, or the epilogue of the matmul.
        stage: index of the stage; the embedding is stage 0, and the first pass has stage 1.
        after: stage of the messages that the pass reads.
        offset: offset of the matrix from the LM head, or of K's plane from the first plane, in
            lines.
        v_offset: for attention, offset of V's plane from the first plane, in lines.
        width: columns of the matrix, in units of 8.
        unit: rows of a unit, which one program computes together.
        units: number of units of the pass's matrix.
        total: number of units of all passes whose units are divided among the programs together,
            such as those of q, k and v.
        start: index of the matrix's first unit among them.
        source: offset of the input in a sequence's activations, in units of 8; for a sum, the
            group of `arguments.Ranks.partials` that has the addends.
        target: offset of the output in a sequence's activations; for k and v, offset of the plane
            in lines; for PARTIAL and SCATTER, the group of `arguments.Ranks.partials`; for an end
            marker, offset of the first inputs. For RESIDUAL, SUM_RESIDUAL and an end marker, it is
            ``-1 - offset`` if only this rank reads its rows of the residual stream next.
        bias: offset of the bias in the vectors; -1 if there is none.
        norm: for RESIDUAL and SUM_RESIDUAL, offset in the vectors of the next norm's weight for the
            first row that this rank computes. For an end marker, that of the first layer's norm;
            -1 if the passes do not begin with the embedding. For a normed SUM_INNER, the stage that
            sent the squares of the residual stream.
        normed: whether the input is the residual stream times the norm's weights, not yet divided
            by its rms; for a SUM_INNER, whether that was the input of the addends.
        tall: whether tiles have 128 rows.
        stride: row stride of the matrix, in units of 8.
    """

    opcode: int
    stage: int
    after: int
    offset: int = 0
    v_offset: int = 0
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
        """Return the fields as numbers."""
        return [int(value) for value in vars(self).values()]


@dataclass(frozen=True)
class Offsets:
    """Offset of each activation in a sequence's messages. The normed residual stream is at 0.

    Attributes:
        embedded: the normed residual stream of stage 0. It has a place of its own if the ranks
            divide the rows of the residual stream, because a rank that has finished a step may send
            it before others have read their last inputs.
        attended: output of attention `[heads * dim]`.
        query: q `[heads * dim]`, followed by new k and new v, `[kv_heads * dim]` each.
        gated: SiLU(gate) · up `[intermediate]`.
        inner: outputs of the stacked V, one offset for each of `PROJECTION_GROUPS`. With one rank,
            all are equal. With several, they differ, because another rank may already send its
            outputs of the next group.
        end: number of messages.
    """

    embedded: int
    attended: int
    query: int
    gated: int
    inner: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, weights: PackedWeights, ranks: int = 1) -> "Offsets":
        """Return the offsets for a rank of a worker, which are the same on all ranks.

        Args:
            weights: the rank's part of the model.
            ranks: number of ranks.
        """
        config = weights.config.whole or weights.config  # ranks may have parts of different sizes
        heads = config.num_heads * config.head_dim
        query = config.hidden_size + heads
        gated = query + heads + 2 * config.num_kv_heads * config.head_dim
        first = gated + config.intermediate_size
        size = round_up(weights.max_inner * ranks)
        inner = tuple(first + size * (group if ranks > 1 else 0) for group in range(4))
        end = embedded = inner[-1] + size
        if weights.residual_rows is None:
            embedded = 0
        else:
            end += config.hidden_size
        return cls(embedded, config.hidden_size, query, gated, inner, -(-end // 16) * 16)


def build_passes(
    weights: PackedWeights,
    planes: Sequence[Tensor],
    offsets: Offsets,
    tall: int,
    address: Address = Tensor.data_ptr,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> list[Pass]:
    """Return all passes of a step, followed by an end marker.

    The end marker has the next stage number. Its ``norm`` and ``target`` are those of stage 0, in
    which the first layer's norm is applied to the embedding.

    Args:
        planes: K and V of every layer.
        tall: minimum number of rows of a narrow matrix, over all programs, for tall tiles.
        address: returns the byte address of a tensor.
        rank, ranks: number of this rank, whose part of the model is ``weights``; number of ranks.
    """
    builder = _PassBuilder(weights, planes, offsets, tall, address)
    builder.rank, builder.ranks = rank, ranks
    for number, layer in enumerate(weights.layers):
        builder.layer(number, layer)
    builder.matrix(opcodes.LOGITS.value, weights.lm_head, builder.normed_stage, 0, normed=True)
    norm, target = builder.sent_residual(weights.layers[0], "q", weights.layers[0].input_norm)
    target += offsets.embedded if target >= 0 else -offsets.embedded
    return [*builder.passes, Pass(0, builder.stage + 1, 0, norm=norm, target=target)]


def split_at_attention(passes: Sequence[Pass]) -> tuple[list[list[Pass]], list[int]]:
    """Split the passes of a step at the attention of each layer, and drop the attention.

    Each list ends with a marker. Its stage is 0 except in the last list: stage 0 tells the launch
    not to advance the flags, so that the next launch continues with them.

    Returns:
        The lists, one more than there are layers; and the stage of the attention of each layer.
    """
    *passes, end = passes
    lists: list[list[Pass]] = [[]]
    stages = []
    for one in passes:
        if one.opcode == opcodes.ATTEND.value:
            stages.append(one.stage)
            lists.append([])
        else:
            lists[-1].append(one)
    last = len(stages)
    for number, own in enumerate(lists):
        stage, norm = end.stage if number == last else 0, end.norm if number == 0 else -1
        own.append(replace(end, stage=stage, norm=norm))
    return lists, stages


class _PassBuilder:
    """Appends the passes of one layer after another.

    Attributes:
        rank, ranks: see `build_passes`.
        first_row, rows: first row of the residual stream that this rank computes, and their number.
        stage: stage of the next pass.
        normed_stage: stage that sent the current normed residual stream; 0 is the embedding.
    """

    def __init__(
        self,
        weights: PackedWeights,
        planes: Sequence[Tensor],
        offsets: Offsets,
        tall: int,
        address: Address,
    ) -> None:
        self._weights = weights
        self._planes = planes
        self._offsets = offsets
        self._tall = tall
        self._address = address
        self.passes: list[Pass] = []
        self.rank, self.ranks = 0, 1
        own = weights.residual_rows
        self.rows = weights.config.hidden_size if own is None else len(own.rows)
        self.first_row = 0 if own is None else own.rows.start
        self._divides_rows = own is not None
        self.stage = 1
        self.normed_stage = 0

    def layer(self, number: int, layer: PackedLayer) -> None:
        following = next(iter(self._weights.layers[number + 1 :]), None)
        next_norm = self._weights.final_norm if following is None else following.input_norm
        k_plane, v_plane = (
            self._lines(plane, self._planes[0]) for plane in self._planes[2 * number :][:2]
        )
        self._qkv(layer, k_plane, v_plane)
        attend = Pass(opcodes.ATTEND.value, self.stage, self.stage - 1, k_plane, v_plane)
        self.passes.append(attend)
        self.stage += 1
        after_o = self.sent_residual(layer, "gate", layer.post_norm)
        self._residual("o", layer, self._offsets.attended, *after_o)
        self._gate_up(layer)
        after_down = self.sent_residual(following, "q", next_norm)
        self._residual("down", layer, self._offsets.gated, *after_down)

    def sent_residual(self, reader: PackedLayer | None, first: str, norm: int) -> tuple[int, int]:
        """Return ``norm`` and ``target`` of a pass that writes the residual stream; see `Pass`.

        Args:
            reader: the layer that reads it next; None for the LM head.
            first: first projection of the group that reads it.
            norm: offset of the norm's weight for the whole residual stream.
        """
        if reader is not None and first in reader.norm_after_v:
            return self._weights.ones + self.first_row, -1 - self.first_row
        return norm + self.first_row, self.first_row

    def _qkv(self, layer: PackedLayer, k_plane: int, v_plane: int) -> None:
        names = PROJECTION_GROUPS[0]
        normed = 0 if self.normed_stage else self._offsets.embedded
        after = self._inner(layer, names[0], self.normed_stage, normed)
        total = sum(len(layer.outer[name].weight) for name in names) // _HEAD_UNIT
        start = 0
        for name, target in zip(names, (0, k_plane, v_plane), strict=True):
            matrix = layer.outer[name]
            stage, source, is_normed = self._input(
                matrix, names[0], self.normed_stage, after, normed
            )
            self.matrix(
                HEAD_OPCODES[name], matrix, stage, source, unit=_HEAD_UNIT, start=start,
                total=total, target=target, normed=is_normed,
            )  # fmt: skip
            start += len(matrix.weight) // _HEAD_UNIT
        self.stage += 1

    def _gate_up(self, layer: PackedLayer) -> None:
        after = self._inner(layer, "gate", self.normed_stage, 0)
        for name, opcode in (("gate", opcodes.GATE.value), ("up", opcodes.UP.value)):
            matrix = layer.outer[name]
            stage, source, normed = self._input(matrix, "gate", self.normed_stage, after, 0)
            self.matrix(opcode, matrix, stage, source, target=self._offsets.gated, normed=normed)
        self.stage += 1

    def _residual(self, name: str, layer: PackedLayer, source: int, norm: int, target: int) -> None:
        before = self.stage - 1
        after = self._inner(layer, name, before, source)
        matrix = layer.outer[name]
        stage, source, _ = self._input(matrix, name, before, after, source)
        if self.ranks > 1 and name not in layer.inner:
            scatters = opcodes.SCATTER if self._divides_rows else opcodes.PARTIAL
            self._add(scatters.value, name, matrix, before, source)
            self._sum(opcodes.SUM_RESIDUAL.value, name, self.rows, norm=norm, target=target)
        else:
            self.matrix(
                opcodes.RESIDUAL.value, matrix, stage, source, rows=self.rows, norm=norm,
                target=target,
            )  # fmt: skip
        self.normed_stage = self.stage
        self.stage += 1

    def _add(
        self,
        opcode: int,
        name: str,
        matrix: PackedMatrix,
        after: int,
        source: int,
        columns: int | None = None,
    ) -> None:
        """Append the pass of a matrix whose columns the ranks divide. One rank has its bias.

        Args:
            columns: number of the matrix's columns without padding; None for all.
        """
        self.matrix(opcode, matrix, after, source, target=_FIRST.index(name), columns=columns)
        self.stage += 1

    def _sum(
        self,
        opcode: int,
        name: str,
        rows: int,
        *,
        norm: int = 0,
        target: int = 0,
        normed: bool = False,
    ) -> None:
        """Append the pass that sums ``rows`` outputs of `_add` over all ranks."""
        self.passes.append(
            Pass(
                opcode, self.stage, self.stage - 1, units=rows, total=rows, target=target,
                source=_FIRST.index(name), norm=norm, normed=normed, tall=True,
            )
        )  # fmt: skip

    def _inner(self, layer: PackedLayer, first: str, after: int, source: int) -> int:
        """Append the pass of a group's stacked V, if the group has factor pairs.

        Args:
            first: name of the group's first projection.
            after: stage of the group's input.
            source: offset of the group's input.

        Returns:
            Stage of the inner activations, if there are any.
        """
        if first in layer.inner:
            matrix, target = layer.inner[first], self._offsets.inner[_FIRST.index(first)]
            if self.ranks > 1 and first in _RESIDUAL_GROUPS:
                self._add(opcodes.PARTIAL.value, first, matrix, after, source)
                rows = len(matrix.weight) if self.rows else 0  # without rows of U, they have no use
                self._sum(opcodes.SUM_INNER.value, first, rows, target=target)
            elif first in layer.norm_after_v:
                self._add(
                    opcodes.PARTIAL.value, first, matrix, after, source + self.first_row, self.rows
                )
                self._sum(
                    opcodes.SUM_INNER.value, first, len(matrix.weight), target=target,
                    norm=after, normed=True,
                )  # fmt: skip
            else:
                target += self.rank * len(matrix.weight)  # every rank sends its rows to all
                normed = first not in _RESIDUAL_GROUPS
                self.matrix(
                    opcodes.INNER.value, matrix, after, source, target=target, normed=normed,
                    rows=self._rows_in_use(layer, first),
                )  # fmt: skip
            self.stage += 1
        return self.stage - 1

    def _rows_in_use(self, layer: PackedLayer, first: str) -> int:
        """Return the number of rows of a group's stacked V that some U reads.

        Rows at the end may be padding. Nobody would wait for a program that computes only such
        rows, so that its inputs might be overwritten before it reads them.
        """
        names = next(names for names in PROJECTION_GROUPS if names[0] == first)
        pairs = [layer.outer[name] for name in names if layer.outer[name].inner_column >= 0]
        total = max(pair.inner_column + pair.weight.shape[1] for pair in pairs)
        height = len(layer.inner[first].weight)
        return min(max(total - self.rank * height, 0), height)

    def _input(
        self, matrix: PackedMatrix, first: str, before: int, inner_stage: int, source: int
    ) -> tuple[int, int, bool]:
        """Return stage and offset of a matrix's input, and whether it is normed (see `Pass`).

        Args:
            first: name of the first projection of the matrix's group.
        """
        if matrix.inner_column < 0:
            return before, source, first not in _RESIDUAL_GROUPS
        inner = self._offsets.inner[_FIRST.index(first)]
        return inner_stage, inner + matrix.inner_column, False

    def matrix(
        self,
        opcode: int,
        matrix: PackedMatrix,
        after: int,
        source: int,
        *,
        rows: int | None = None,
        unit: int = 1,
        start: int = 0,
        total: int | None = None,
        target: int = 0,
        norm: int = 0,
        normed: bool = False,
        columns: int | None = None,
    ) -> None:
        """Append the pass of one matrix, or of its first ``rows`` and ``columns``."""
        rows = len(matrix.weight) if rows is None else rows
        width = matrix.weight.shape[1] if columns is None else columns
        units = rows // unit
        total = units if total is None else total
        enough = total * unit >= self._tall
        tall = width <= _MAX_TALL_WIDTH and enough and opcode != opcodes.RESIDUAL.value
        self.passes.append(
            Pass(
                opcode,
                self.stage,
                after,
                offset=self._lines(matrix.weight, self._weights.lm_head.weight),
                width=width // VECTOR_ELEMENTS,
                start=start,
                units=units,
                total=total,
                unit=unit,
                source=source // VECTOR_ELEMENTS,
                target=target,
                bias=matrix.bias,
                norm=norm,
                normed=normed,
                tall=tall,
                stride=matrix.weight.stride(0) // VECTOR_ELEMENTS,
            )
        )

    def _lines(self, tensor: Tensor, base: Tensor) -> int:
        distance = self._address(tensor) - self._address(base)
        if distance % LINE_BYTES:
            raise ValueError(f"the offset of a tensor is not a multiple of {LINE_BYTES} bytes")
        return distance // LINE_BYTES
