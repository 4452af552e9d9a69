"""Mixed passes give the same results as separate passes without padding, on the CPU."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.core.plan import MAX_CHUNKS
from runtime.engine import Add, Cancel, Command
from runtime.kv.cache import PagedCache
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from runtime.steps.mixed import MixedReplay, pass_shapes
from runtime.steps.pass_inputs import PassShape
from runtime.steps.slots import BatchSlots
from tests.runtime.attention.samples import pages_of
from tests.runtime.steps.scripts import SAMPLINGS, Watch, compare, engine_of, play, request
from tests.runtime.tiny import tiny_checkpoint

PAGES, SLOTS, VOCAB = 60, 12, 211


class Passes:
    """Mixed passes of a tiny model, and the same batch computed without them.

    Attributes:
        logits: fp32 `[SLOTS, vocab]`, written by the mixed passes.
        cache, expected: pages with equal contents before the pass.
    """

    def __init__(self, max_rows: int = 128, *, bias: bool = False, norms: bool = False) -> None:
        self.model = build_model(tiny_checkpoint(bias=bias, head_norms=norms))
        self.cache, self.expected = (self.model.new_cache(PageCount(PAGES + 1)) for _ in range(2))
        self.slots = BatchSlots(SLOTS, 25, (PAGES,), self.model.device)
        self.logits = torch.zeros(SLOTS, VOCAB)
        self.replay = MixedReplay(
            self.model, self.cache, self.slots, self.logits, None, max_rows=max_rows
        )

    def fill(self) -> None:
        """Fill the static tensors and the pages with other values."""
        self.replay.run([SequenceSlice([5] * 100, 0, list(range(7)))], completed=[(0, 0)])
        for plane, other in zip(self.cache.planes, self.expected.planes, strict=True):
            other.copy_(plane.normal_())

    def occupy(self, slot: int, token: int, position: int, pages: Sequence[int]) -> None:
        """Assign a slot to a sequence whose last token is ``token``."""
        slots = self.slots
        slots.tokens[slot], slots.positions[slot] = token, position
        slots.page_tables[0, slot, : len(pages)] = torch.tensor(pages)

    def alone(self, slices: list[SequenceSlice]) -> Tensor:
        """Compute a batch on the pages ``expected`` and return its logits."""
        return self.model.forward(Batch.of(slices), self.expected)


def equal_pages(cache: PagedCache, expected: PagedCache) -> bool:
    planes = zip(cache.planes, expected.planes, strict=True)
    return all(torch.equal(plane[:PAGES], other[:PAGES]) for plane, other in planes)


@pytest.mark.parametrize(
    "pieces",
    [
        # (first position, number of tokens, completes)
        [(0, 16, True)],
        [(0, 1, True)],
        [(32, 17, False)],
        [(0, 37, True), (16, 5, False), (48, 1, True)],
        [(0, 3, True)] * 8,
        [(16, 60, True), (0, 58, True)],
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(), (33,), (1, 16, 17, 90, 5, 5, 5, 5, 64, 2)], ids=len)
@pytest.mark.parametrize("norms", [False, True], ids=["bias", "norms"])
def test_mixed_pass_equals_separate_passes(
    pieces: list[tuple[int, int, bool]], lengths: tuple[int, ...], norms: bool
) -> None:
    """Logits and pages have the same bits; ``lengths`` are those of the decoded sequences."""
    passes = Passes(bias=not norms, norms=norms)
    passes.fill()
    pages = pages_of([first + count for first, count, _ in pieces] + list(lengths))
    chunks = [
        SequenceSlice([7 * n % VOCAB for n in range(count)], first, own, logits)
        for (first, count, logits), own in zip(pieces, pages, strict=False)
    ]
    slots = list(range(SLOTS))[::-1][: len(lengths)]  # slots in another order than sequences
    decode = []
    for slot, length, own in zip(slots, lengths, pages[len(pieces) :], strict=True):
        decode.append(SequenceSlice([slot + 3], length - 1, own))
        passes.occupy(slot, slot + 3, length - 1, own)
    free = [slot for slot in range(SLOTS) if slot not in slots]
    ending = [index for index, piece in enumerate(chunks) if piece.want_logits]
    choices = [index for index in ending for _ in range(2)]
    completed = list(zip(free, choices, strict=False))
    passes.replay.run(chunks, slots, completed)
    expected = passes.alone(chunks)
    for slot, index in completed:
        assert torch.equal(passes.logits[slot], expected[ending.index(index)])
    if decode:
        assert torch.equal(passes.logits[slots], passes.alone(decode))
    assert equal_pages(passes.cache, passes.expected)


@pytest.mark.parametrize(
    "counts", [[65], [1] * (MAX_CHUNKS + 1), [64], [60, 5]], ids=lambda counts: str(counts[:2])
)
def test_pass_larger_than_all_graphs_is_computed_without_padding(counts: list[int]) -> None:
    passes = Passes(max_rows=64)
    passes.fill()
    pages = pages_of([*counts, 20])
    chunks = [
        SequenceSlice(range(count), 0, own) for count, own in zip(counts, pages, strict=False)
    ]
    passes.occupy(3, 9, 19, pages[-1])
    passes.replay.run(chunks, [3], [(1, len(chunks) - 1)])
    assert torch.equal(passes.logits[1], passes.alone(chunks)[-1])
    assert torch.equal(passes.logits[3], passes.alone([SequenceSlice([9], 19, pages[-1])])[0])
    assert equal_pages(passes.cache, passes.expected)


def test_shapes_cover_every_step_within_the_limits() -> None:
    for max_rows, max_slots in ((512, 64), (1000, 256), (16, 3), (2048, 8)):
        shapes = pass_shapes(max_rows, max_slots, decodes=True)
        assert shapes == sorted(set(shapes), reverse=True)
        largest = PassShape(max_rows, max_slots, max_slots)
        assert largest in shapes or max_slots >= max_rows
        assert PassShape(max_rows, 0, 0) in shapes
    for rows, decoded, sampled in pass_shapes(2048, 256, decodes=False):
        assert decoded == 0
        assert sampled in (8, 64, 256) or (rows, sampled) == (2048, 0)


def test_warm_up_reports_every_size_and_writes_only_the_null_page() -> None:
    passes = Passes(max_rows=100)
    for plane in passes.cache.planes:
        plane.fill_(7)
    progress: list[int] = []
    passes.replay.warm_up(progress.append)
    assert progress == [100, 64, 32, 16]
    for plane in passes.cache.planes:
        assert (plane[:PAGES] == 7).all()


def test_engine_decodes_while_prompts_are_computed(model: Model) -> None:
    """Chunks of prompts with every kind of sampling join a running batch."""
    script: list[list[Command]] = [[Add(request(0, 5, 60, 0, 1))]]
    script += [
        [Add(request(number, 11 * number, 20, number % len(SAMPLINGS), 1 + number % 3))]
        for number in range(1, 12)
    ]
    script[8].append(Cancel("r3"))
    script[9].append(Add(request(20, 90, 20, 2, 2), hold=True))
    plain = play(engine_of(model, 60, 9, replay=False), script)
    engine = engine_of(model, 60, 9, replay=True)
    with Watch().over(engine) as watch:
        compare(play(engine, script), plain, {"r3"})
    assert watch.mixed > 10


@pytest.mark.parametrize("tokens", [1, 3])
def test_held_prompts_with_flat_distributions_are_sampled(model: Model, tokens: int) -> None:
    """The host draws their tokens after later steps have overwritten the logits."""
    requests = [request(2 * number, 20 + number, tokens, 8, 2) for number in range(6)]
    script: list[list[Command]] = [[Add(r, hold=True)] for r in requests]
    plain = play(engine_of(model, 60, 4, replay=False), script)
    engine = engine_of(model, 60, 4, replay=True)
    with Watch().over(engine) as watch:
        compare(play(engine, script), plain, set())
    assert watch.unresolved == 0
