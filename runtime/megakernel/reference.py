"""Interpreter of the megakernel's pass list in torch: the specification of the kernel.

It runs the passes over one sequence, one after another, on all ranks of a worker in turn. It checks
the protocol of activations and addends: a pass reads only messages of the stage that it waits for,
and does not overwrite a message that may still be read. Sums of squares, and the embedding that its
rank sends to the others, are not messages here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from runtime.gemm.weights import PROJECTION_GROUPS, PackedWeights, by_halves
from runtime.kernels.alignment import LINE_BYTES, VECTOR_ELEMENTS
from runtime.layers.rope import cos_sin_table
from runtime.megakernel.kernels import opcodes
from runtime.megakernel.schedule import HEAD_OPCODES, Offsets, Pass, build_passes
from runtime.parallel.partition import Partition

_SPACING = (1 << 34) + 7
"""Distance between the artificial addresses of consecutive tensors, in lines: not a small number,
since allocators may place tensors anywhere in 47 bits."""


class ProtocolError(Exception):
    """A pass read a message of another stage, or overwrote one that may still be read."""


class Messages:
    """Activations of one sequence, with the stages in which each was written and last read."""

    def __init__(self, size: int) -> None:
        self._values = torch.full((size,), math.nan)
        self._written = torch.full((size,), -1)
        self._read = torch.full((size,), -1)

    def read(self, first: int, count: int, reader: Pass) -> Tensor:
        """Return ``count`` values, starting at offset ``first``.

        Raises:
            ProtocolError: a value was not written in stage ``reader.after``, as ``reader`` expects.
        """
        place = slice(first, first + count)
        if not (self._written[place] == reader.after).all():
            raise ProtocolError(f"{reader} reads messages of another stage")
        self._read[place] = reader.stage
        return self._values[place]

    def write(self, first: int, values: Tensor, stage: int, after: int) -> None:
        """Store the output of a pass of ``stage`` that reads messages of stage ``after``.

        Raises:
            ProtocolError: a value to be overwritten was read in a stage later than ``after``.
        """
        place = slice(first, first + len(values))
        if not (self._read[place] <= after).all():
            raise ProtocolError(f"stage {stage} overwrites messages that may still be read")
        self._values[place], self._written[place] = values, stage


@dataclass
class _State:
    """State of a rank during a step.

    Attributes:
        messages: activations.
        partials: addends by (group, rank), see `kernels.arguments.Ranks.partials`.
        hidden: rows of the residual stream that the rank computes.
    """

    messages: Messages
    partials: dict[tuple[int, int], Messages]
    hidden: Tensor
    gates: Tensor
    logits: Tensor


class Interpreter:
    """Runs the pass list of a model, or of a rank's part of it, for one sequence, in fp32.

    Args:
        planes: K and V of all layers, bf16 `[page, kv_head, slot, dim]`.
        tall: as in `build_passes`; changes tiles, not results.
        partition: part of the model that this rank has; None for one rank.

    Attributes:
        passes: the pass list, including the end marker.
        offsets: offsets of the activations.
    """

    def __init__(
        self,
        weights: PackedWeights,
        planes: Sequence[Tensor],
        tall: int,
        partition: Partition | None = None,
    ) -> None:
        matrices = [weights.lm_head.weight]
        for layer in weights.layers:
            matrices += [matrix.weight for matrix in layer.matrices]
        tensors = [*matrices, *planes]
        lines = {id(tensor): _SPACING * number for number, tensor in enumerate(tensors)}
        self._tensors = {line: tensors[line // _SPACING] for line in lines.values()}
        self._first_plane = lines[id(planes[0])]
        self._weights = weights
        own = weights.residual_rows
        self._rows = None if own is None else own.rows
        self._config = weights.config
        self._page = planes[0].shape[2]
        self._rope = cos_sin_table(self._config, self._config.context_length)
        self._rank, self._ranks, self._tokens = 0, 1, range(self._config.vocab_size)
        if partition is not None:
            self._rank, self._ranks = partition.rank, partition.size
            self._tokens = partition.tokens
        self.offsets = Offsets.of(weights, self._ranks)
        self.passes = build_passes(
            weights, planes, self.offsets, tall, lambda tensor: lines[id(tensor)] * LINE_BYTES,
            rank=self._rank, ranks=self._ranks,
        )  # fmt: skip

    def run(self, token: int, position: int, pages: list[int]) -> Tensor:
        """Write the token's K and V into ``pages``; return its logits, fp32 `[vocab]`."""
        return run_ranks([self], token, position, pages)

    def embedding(self, token: int) -> Tensor | None:
        """Return the embedding of a token, fp32 `[hidden]`; None if another rank holds it."""
        if token not in self._tokens:
            return None
        return self._weights.embedding[token - self._tokens.start].float()

    def begin(self, hidden: Tensor) -> _State:
        """Return the state before stage 0, with this rank's rows of the embedding ``hidden``."""
        size = max(len(hidden), *(one.units for one in self.passes))
        places = product(range(len(PROJECTION_GROUPS)), range(self._ranks))
        partials = {place: Messages(size) for place in places}
        own = hidden if self._rows is None else hidden[self._rows.start : self._rows.stop]
        return _State(Messages(self.offsets.end), partials, own, torch.empty(0), torch.empty(0))

    def send_embedding(self, states: Sequence[_State], *, next_step: bool = False) -> None:
        """Execute stage 0 on this rank, which sends its rows of the embedding.

        Args:
            next_step: execute that of the following step.
        """
        end = self.passes[-1]
        if next_step:  # the contents do not matter
            self._send_residual(replace(end, after=end.stage), states)
        else:
            self._send_residual(replace(end, stage=0, after=0), states)

    def _send_residual(self, one: Pass, states: Sequence[_State]) -> None:
        """Send the residual stream, multiplied by the next norm's weights."""
        own = states[self._rank]
        normed = own.hidden * self._vector(one.norm, len(own.hidden))
        gathers = self._rows is not None and one.target >= 0
        target = one.target if one.target >= 0 else -1 - one.target
        for each in states if gathers else [own]:
            each.messages.write(target, normed, one.stage, one.after)

    def execute(self, one: Pass, states: Sequence[_State], position: int, pages: list[int]) -> None:
        """Execute a pass on this rank.

        Args:
            states: states of all ranks. Some passes send their outputs to every rank.
        """
        own = states[self._rank]
        messages = own.messages
        if one.opcode == opcodes.ATTEND.value:
            attended = self._attend(messages, one, position, pages)
            messages.write(self.offsets.attended, attended, one.stage, one.after)
            return
        if not one.units:  # this rank has none of the rows, and reads nothing
            return
        if one.opcode >= opcodes.SUM_INNER.value:
            parts = [own.partials[one.source, rank] for rank in range(self._ranks)]
            y = sum((part.read(0, one.units, one) for part in parts), torch.zeros(one.units))
            y = y / self._rms(states) if one.normed else y
        else:
            y = self._multiply(messages, one, states)
        if one.opcode in HEAD_OPCODES.values():
            self._write_heads(messages, one, y, position, pages)
            return
        if one.bias >= 0:
            y = y + self._vector(one.bias, len(y))
        if one.opcode == opcodes.GATE.value:
            own.gates = y
        elif one.opcode == opcodes.LOGITS.value:
            own.logits = y
        elif one.opcode == opcodes.PARTIAL.value:
            for each in states:
                each.partials[one.target, self._rank].write(0, y, one.stage, one.after)
        elif one.opcode == opcodes.SCATTER.value:
            height = len(states[0].hidden)
            for each, part in zip(states, torch.split(y, height), strict=False):
                each.partials[one.target, self._rank].write(0, part, one.stage, one.after)
        elif one.opcode == opcodes.INNER.value:
            for each in states:
                each.messages.write(one.target, y, one.stage, one.after)
        elif one.opcode in (opcodes.RESIDUAL.value, opcodes.SUM_RESIDUAL.value):
            own.hidden = own.hidden + y
            self._send_residual(one, states)
        else:
            if one.opcode == opcodes.UP.value:
                y = functional.silu(own.gates) * y
            messages.write(one.target, y, one.stage, one.after)

    def _multiply(self, messages: Messages, one: Pass, states: Sequence[_State]) -> Tensor:
        """Return the output of a pass's matmul.

        If the pass is normed, the output is divided by the rms of the residual stream.
        """
        matrix = self._tensors[one.offset][: one.units * one.unit]
        if one.stride * VECTOR_ELEMENTS != matrix.stride(0):
            raise ValueError(f"the row stride of {one} is not that of its matrix")
        count = self._config.hidden_size if one.normed else one.width * VECTOR_ELEMENTS
        x = messages.read(one.source * VECTOR_ELEMENTS, count, one)
        y = matrix[:, :count].float() @ x
        return y / self._rms(states) if one.normed else y

    def _rms(self, states: Sequence[_State]) -> float:
        """Return the rms of the whole residual stream."""
        parts = [states[self._rank]] if self._rows is None else states
        square = sum(float(each.hidden.square().sum()) for each in parts)
        return math.sqrt(square / self._config.hidden_size + self._config.rms_norm_eps)

    def _vector(self, first: int, count: int) -> Tensor:
        return self._weights.vectors[first : first + count]

    def _write_heads(
        self, messages: Messages, one: Pass, y: Tensor, position: int, pages: list[int]
    ) -> None:
        """Apply RoPE to q or k, write k or v into its page, and send q, k or v."""
        config, dim = self._config, self._config.head_dim
        natural = torch.empty_like(y)
        natural[by_halves(torch.arange(len(y)), dim)] = y
        if one.bias >= 0:
            natural = natural + self._vector(one.bias, len(y))
        heads = natural.view(-1, dim)  # [heads, dim]
        is_value = one.opcode == opcodes.VALUE.value
        if not is_value:
            cos, sin = (table[position] for table in self._rope)
            first, second = heads[:, : dim // 2], heads[:, dim // 2 :]
            heads = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)
        heads = heads.bfloat16()
        offset = self.offsets.query
        if one.opcode != opcodes.QUERY.value:
            offset += (config.num_heads + config.num_kv_heads * is_value) * dim
            plane = self._tensors[self._first_plane + one.target]
            plane[pages[position // self._page], :, position % self._page] = heads
        messages.write(offset, heads.flatten().float(), one.stage, one.after)

    def _attend(self, messages: Messages, one: Pass, position: int, pages: list[int]) -> Tensor:
        """Return attention `[heads * dim]` over the past in pages and the new token."""
        config, dim = self._config, self._config.head_dim
        count = (config.num_heads + 2 * config.num_kv_heads) * dim
        new = messages.read(self.offsets.query, count, one).view(-1, dim)
        queries, new_k, new_v = torch.split(
            new, [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        )
        keys, values = (
            self._tensors[self._first_plane + line][pages].transpose(0, 1).flatten(1, 2).float()
            for line in (one.offset, one.v_offset)
        )  # [kv_heads, slots, dim] each
        out = []
        for head, query in enumerate(queries):
            own = head // (config.num_heads // config.num_kv_heads)
            k = torch.cat([keys[own, :position], new_k[own, None]])
            v = torch.cat([values[own, :position], new_v[own, None]])
            out.append(torch.softmax(k @ query / math.sqrt(dim), 0) @ v)
        return torch.cat(out)


def run_ranks(ranks: Sequence[Interpreter], token: int, position: int, pages: list[int]) -> Tensor:
    """Run a step on all ranks of a worker, pass by pass, and begin the next one.

    Returns:
        Logits of all tokens, fp32 `[vocab]`.
    """
    hidden = next(row for rank in ranks if (row := rank.embedding(token)) is not None)
    states = [rank.begin(hidden) for rank in ranks]
    for rank in ranks:
        rank.send_embedding(states)
    *most, last = zip(*(rank.passes[:-1] for rank in ranks), strict=True)
    for passes in most:
        for rank, one in zip(ranks, passes, strict=True):
            rank.execute(one, states, position, pages)
    for rank, one in zip(ranks, last, strict=True):
        rank.execute(one, states, position, pages)
        rank.send_embedding(states, next_step=True)  # it does not wait for the other ranks
    return torch.cat([state.logits for state in states])
