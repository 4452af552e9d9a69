"""The list of a decode step's passes, gone through in torch as the kernel's programs do."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.gemm.weights import EIGHT, LINE, LINE_BYTES, StepWeights, by_halves, up
from runtime.layers.rope import cos_sin_table
from runtime.megakernel.kernels import opcodes as kinds
from runtime.megakernel.schedule import HEADS, Pass, Places, passes_of
from runtime.models.model import Model
from tests.runtime.tiny import CONFIG, tiny_checkpoint

RANKS = [(None,) * 7, (9, 5, 8, 12, 17, 11, 24), (9, None, 8, None, 17, None, 24)]
DIM, GROUP = CONFIG.head_dim, CONFIG.num_heads // CONFIG.num_kv_heads


class Words:
    """Numbers and the stage each is of. Reading another stage, and writing what somebody might
    still read, fail."""

    def __init__(self, size: int) -> None:
        self._numbers = torch.full((size,), math.nan)
        self._stages = torch.full((size,), -1)
        self._read = torch.full((size,), -1)

    def read(self, first: int, count: int, reader: Pass) -> Tensor:
        place = slice(first, first + count)
        assert (self._stages[place] == reader.after).all(), reader
        self._read[place] = reader.stage
        return self._numbers[place]

    def write(self, first: int, numbers: Tensor, stage: int, after: int) -> None:
        place = slice(first, first + len(numbers))
        assert (self._read[place] <= after).all()
        self._numbers[place], self._stages[place] = numbers, stage


class Walk:
    """One token of one sequence through all passes."""

    def __init__(self, weights: StepWeights, planes: list[Tensor], tall: int) -> None:
        matrices = [weights.head.weight]
        for layer in weights.layers:
            matrices += [m.weight for m in (*layer.inner.values(), *layer.outer.values())]
        tensors = [*matrices, *planes]
        lines = {id(tensor): 7 * number for number, tensor in enumerate(tensors)}
        self._at = {number: tensors[number // 7] for number in lines.values()}
        self._first_plane = lines[id(planes[0])]
        self.places = Places.of(CONFIG, weights.inner_most)
        self.passes = passes_of(
            weights, planes, self.places, tall, lambda tensor: lines[id(tensor)] * LINE_BYTES
        )
        self._weights, self._planes = weights, planes

    def run(self, token: int, position: int, pages: list[int]) -> Tensor:
        weights, places = self._weights, self.places
        words = Words(places.end)
        hidden = weights.embedding[token].float()
        first_norm = self.passes[-1].norm
        words.write(0, hidden * self._vector(first_norm, len(hidden)), 0, 0)
        gates = logits = torch.empty(0)
        for one in self.passes[:-1]:
            if one.kind == kinds.ATTEND.value:
                words.write(places.attended, self._attend(words, one, position, pages), one.stage,
                            one.after)  # fmt: skip
                continue
            matrix = self._at[one.offset]
            assert one.stride * EIGHT == matrix.stride(0)
            count = CONFIG.hidden_size if one.normed else one.width * EIGHT
            y = matrix[:, :count].float() @ words.read(one.source * EIGHT, count, one)
            if one.normed:
                y = y * torch.rsqrt(hidden.square().mean() + CONFIG.rms_norm_eps)
            if one.kind in HEADS.values():
                self._heads(words, one, y, position, pages)
                continue
            if one.bias >= 0:
                y = y + self._vector(one.bias, len(y))
            if one.kind == kinds.GATE.value:
                gates = y
            elif one.kind == kinds.LOGITS.value:
                logits = y
            elif one.kind == kinds.RESIDUAL.value:
                hidden = hidden + y
                words.write(0, hidden * self._vector(one.norm, len(y)), one.stage, one.after)
            else:
                if one.kind == kinds.UP.value:
                    y = torch.nn.functional.silu(gates) * y
                words.write(one.target, y, one.stage, one.after)
        return logits

    def _vector(self, first: int, count: int) -> Tensor:
        return self._weights.vectors[first : first + count]

    def _heads(self, words: Words, one: Pass, y: Tensor, position: int, pages: list[int]) -> None:
        natural = torch.empty_like(y)
        natural[by_halves(torch.arange(len(y)), DIM)] = y
        if one.bias >= 0:
            natural = natural + self._vector(one.bias, len(y))
        heads = natural.view(-1, DIM)
        if one.kind != kinds.VALUE.value:
            cos, sin = (table[position] for table in cos_sin_table(CONFIG, CONFIG.context_length))
            a, b = heads[:, : DIM // 2], heads[:, DIM // 2 :]
            heads = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)
        heads = heads.bfloat16()
        at = self.places.query
        if one.kind != kinds.QUERY.value:
            at += (CONFIG.num_heads + CONFIG.num_kv_heads * (one.kind == kinds.VALUE.value)) * DIM
            plane = self._at[self._first_plane + one.target]
            plane[pages[position // 16], :, position % 16] = heads
        words.write(at, heads.flatten().float(), one.stage, one.after)

    def _attend(self, words: Words, one: Pass, position: int, pages: list[int]) -> Tensor:
        count = (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * DIM
        new = words.read(self.places.query, count, one).view(-1, DIM)
        queries = new[: CONFIG.num_heads]
        keys, values = (
            self._at[self._first_plane + line][pages].transpose(0, 1).flatten(1, 2).float()
            for line in (one.offset, one.other)
        )
        out = []
        for head, query in enumerate(queries):
            own = head // GROUP
            k = torch.cat([keys[own, :position], new[CONFIG.num_heads + own, None]])
            v = torch.cat([values[own, :position], new[len(new) - CONFIG.num_kv_heads + own, None]])
            out.append(torch.softmax(k @ query / math.sqrt(DIM), 0) @ v)
        return torch.cat(out)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("position", [0, 21])
def test_the_passes_are_the_model(ranks: tuple[int | None, ...], position: int) -> None:
    checkpoint = tiny_checkpoint(ranks=ranks, bias=True)
    model = Model(checkpoint)
    cache = model.new_cache(8)
    text, pages = [(7 * at + 3) % CONFIG.vocab_size for at in range(position + 1)], [3, 5]
    if position:
        before = SequenceSlice(text[:-1], 0, pages, want_logits=False)
        model.forward(Batch.of([before]), cache)
    walk = Walk(StepWeights.of(checkpoint, "cpu"), cache.planes, tall=100)
    found = walk.run(text[-1], position, pages)
    planes = [plane.clone() for plane in cache.planes]
    expected = model.forward(Batch.of([SequenceSlice(text[-1:], position, pages)]), cache)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * float(expected.abs().max()))
    for plane, other in zip(planes, cache.planes, strict=True):
        torch.testing.assert_close(plane, other, rtol=0, atol=0.04)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("programs", [1, 5, 132])
def test_programs_share_all_rows_and_none_twice(
    ranks: tuple[int | None, ...], programs: int
) -> None:
    weights = StepWeights.of(tiny_checkpoint(ranks=ranks), "cpu")
    planes = [torch.zeros(2, CONFIG.num_kv_heads, 16, DIM, dtype=torch.bfloat16)] * 4
    for one in Walk(weights, planes, tall=1).passes[:-1]:
        bounds = [one.total * number // programs - one.start for number in range(programs + 1)]
        clipped = [min(max(bound, 0), one.units) for bound in bounds]
        assert all(first <= last for first, last in pairwise(clipped))
        assert (clipped[0], clipped[-1]) == (0, one.units)


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_begin_lines(ranks: tuple[int | None, ...]) -> None:
    weights = StepWeights.of(tiny_checkpoint(ranks=ranks), "cpu")
    matrices = [weights.head]
    for layer in weights.layers:
        matrices += [*layer.inner.values(), *layer.outer.values()]
    for matrix in matrices:
        assert matrix.weight.data_ptr() % LINE_BYTES == 0
        assert matrix.weight.stride() == (up(matrix.weight.stride(0), LINE), 1)


@pytest.mark.parametrize("hidden", [48, 64])
def test_a_tied_embedding_is_read_without_gaps(hidden: int) -> None:
    """The head's rows begin lines; those of the embedding lie one after the other."""
    checkpoint = tiny_checkpoint(config=replace(CONFIG, hidden_size=hidden))
    weights = StepWeights.of(replace(checkpoint, embedding=checkpoint.lm_head), "cpu")
    assert weights.embedding.is_contiguous()
    assert torch.equal(weights.embedding, weights.head.weight)
    assert (weights.embedding is weights.head.weight) == (hidden == 64)


def test_models_that_the_step_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="norms of heads"):
        StepWeights.of(tiny_checkpoint(head_norms=True), "cpu")
