"""Graphs of mixed passes, and the event that marks a chunk's KV as written."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.attention.base import SequenceSlice
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import SamplingParams
from runtime.engine import Add, Engine, LocalExecutor
from runtime.gemm.model import build_fastest_model
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from runtime.steps.mixed import MixedReplay
from runtime.steps.slots import BatchSlots
from tests.runtime.attention.samples import pages_of
from tests.runtime.tiny import (
    CONFIG,
    drive,
    executor_of,
    request_of,
    tiny_checkpoint,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SLOTS, PAGES = 70, 700
CHECKPOINTS = {
    "dense": tiny_checkpoint(),
    "factorized": tiny_checkpoint(ranks=(9, 5, 8, 12, 17, 11, 24)),
    "head norms": tiny_checkpoint(head_norms=True),
}


@pytest.fixture(params=list(CHECKPOINTS))
def model(request: pytest.FixtureRequest) -> Model:
    checkpoint = CHECKPOINTS[request.param]
    return build_fastest_model(checkpoint, device="cuda", dtype=torch.bfloat16)


def mixed_pass(
    model: Model, lengths: list[int], chunks: list[int], *, graph: bool
) -> tuple[Tensor, list[Tensor]]:
    """Compute a pass three times; return its logits and the pages."""
    device = model.device
    cache = model.new_cache(PageCount(PAGES + 1))
    generator = torch.Generator(device).manual_seed(0)
    for plane in cache.planes:
        plane.normal_(generator=generator)
    slots = BatchSlots(SLOTS, 25, (PAGES,), device)
    pages = pages_of(lengths + chunks)
    for slot, (length, own) in enumerate(zip(lengths, pages, strict=False)):
        slots.tokens[slot], slots.positions[slot] = slot + 3, length - 1
        slots.page_tables[0, slot, : len(own)] = torch.tensor(own)
    pieces = [
        SequenceSlice([n % 200 for n in range(count)], 0, own)
        for count, own in zip(chunks, pages[len(lengths) :], strict=True)
    ]
    logits = torch.zeros(SLOTS, CONFIG.vocab_size, device=device)
    pool = torch.cuda.graph_pool_handle() if graph else None
    replay = MixedReplay(model, cache, slots, logits, pool, max_rows=300)
    slots_of_chunks = [(len(lengths) + index, index) for index in range(len(chunks))]
    for _ in range(3):
        replay.run(pieces, range(len(lengths)), slots_of_chunks)
    return logits[: len(lengths) + len(chunks)], [plane[:PAGES] for plane in cache.planes]


@pytest.mark.parametrize(
    ("lengths", "chunks"),
    [([], [40]), ([33], [16]), ([5, 90, 17], [100, 3]), (list(range(1, 61)), [120, 7, 30])],
    ids=["prompt", "one", "few", "many"],
)
def test_graph_of_a_mixed_pass_gives_the_same_bits_as_its_launches(
    model: Model, lengths: list[int], chunks: list[int]
) -> None:
    with torch.inference_mode():
        logits, planes = mixed_pass(model, lengths, chunks, graph=True)
        expected, expected_planes = mixed_pass(model, lengths, chunks, graph=False)
    assert logits.isfinite().all()
    assert torch.equal(logits, expected)
    assert all(map(torch.equal, planes, expected_planes))


def test_all_requests_of_a_mixed_batch_complete(model: Model) -> None:
    """Prompts join a running batch; choices, penalties and log probabilities are sampled."""
    limits = Limits(max_running=12, max_waiting=64, step_tokens=64, chunk_tokens=32)
    engine = Engine(LocalExecutor(model, EngineOptions(PageCount(300), limits, replay=True)))
    engine.warm_up()
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, logprobs=4),
        SamplingParams(temperature=90.0, seed=14),
    ]
    requests = [
        request_of(f"r{n}", 3 + 13 * n, 20, sampling=samplings[n % 3], choices=1 + n % 2)
        for n in range(20)
    ]
    record = drive(engine, *(Add(replace(r, id=f"held-{r.id}"), hold=True) for r in requests[:4]))
    drive(engine, *map(Add, requests), record=record)
    for request in requests:
        for choice in range(request.choices):
            assert len(record.output(request.id, choice)) == 20
    assert all(record.output(f"held-{r.id}") for r in requests[:4])


def test_other_stream_reads_a_chunk_after_its_event(model: Model) -> None:
    limits = Limits(max_running=4, max_waiting=4, step_tokens=128, chunk_tokens=128)
    engine = Engine(LocalExecutor(model, EngineOptions(PageCount(60), limits, replay=True)))
    engine.warm_up()
    for plane in executor_of(engine).cache.planes:
        plane.fill_(torch.nan)
    torch.cuda.synchronize()
    output = engine.step([Add(request_of("r", 300), hold=True)])
    (chunk,) = output.computed
    assert chunk.ready is not None
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        executor_of(engine).cache.events.wait(chunk.ready)
        pages = list(chunk.page_tables[0])
        found = [plane[pages].isnan().any() for plane in executor_of(engine).cache.planes]
        torch.cuda.current_stream().synchronize()
    assert not any(found)
    drive(engine)
