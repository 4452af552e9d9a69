"""Engines with compressed KV formats: results equal a plain loop, and no page is lost."""

from collections.abc import Generator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import Request, SampledToken, SamplingParams
from runtime.core.sequence import FREED
from runtime.engine import Add, Cancel, Engine, LocalExecutor
from runtime.errors import OutOfPages
from runtime.kv.registry import COMPRESSED
from runtime.kv.windowed import WindowedFormat
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.plan import PageCount, pages_for
from runtime.pages.window import SINK_PAGES, first_recent
from tests.runtime.engine.by_hand import GREEDY, SEEDED, all_free, sampled_by_hand
from tests.runtime.pages.plans import compressed_plan
from tests.runtime.tiny import Record, drive, engine_of, replayed, request_of, tiny_checkpoint

pytestmark = pytest.mark.slow

PAGE = 16
PLAN = compressed_plan(PAGE)


@pytest.fixture(scope="module")
def model() -> Model:
    """A model with the coarsest format, so that stored pages change its results."""
    return build_model(tiny_checkpoint(), kv_format="k4v2")


def logits_by_hand(model: Model, request: Request) -> Generator[Tensor, int, None]:
    """Yield logits `[1, vocab]` after the prompt and after each token that is sent."""
    count = pages_for(len(request.tokens) + request.max_tokens, PAGE)
    cache = model.new_cache(PageCount(count, count))
    pages, stored = list(range(count)), list(reversed(range(SINK_PAGES, count)))
    tokens = list(request.tokens)
    token = yield model.forward(Batch.of([SequenceSlice(tokens, 0, pages)]), cache)
    ended = torch.arange(SINK_PAGES, first_recent(len(tokens), PAGE))
    assert isinstance(model.kv_format, WindowedFormat)
    layers = [cache.layer(index) for index in range(model.config.num_layers)]
    model.kv_format.encoder(layers).encode(
        ended, torch.tensor(stored)[ended - SINK_PAGES], ended * PAGE
    )
    while True:
        piece = SequenceSlice([token], len(tokens), pages, more_pages=[[-1] * SINK_PAGES + stored])
        tokens.append(token)
        token = yield model.forward(Batch.of([piece]), cache)


def output_by_hand(model: Model, request: Request, choice: int = 0) -> list[SampledToken]:
    """Return the output of a choice, without the engine."""
    return sampled_by_hand(logits_by_hand(model, request), request, choice)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", COMPRESSED)
def test_output_equals_a_plain_loop(name: str) -> None:
    model = build_model(tiny_checkpoint(), kv_format=name)
    requests = [
        request_of(f"r{length}", length, 60, sampling=sampling)
        for length, sampling in ((30, GREEDY), (79, SEEDED), (80, GREEDY), (150, SEEDED))
    ]
    engine = engine_of(model, stored=64)
    together = drive(engine, *map(Add, requests))
    for request in requests:
        expected = output_by_hand(model, request)
        assert drive(engine, Add(replace(request, id="alone"))).tokens["alone", 0] == expected
        assert together.tokens[request.id, 0] == expected
    assert all_free(engine)


def test_stored_pages_change_the_output(model: Model) -> None:
    request = request_of("r", 150, 60, sampling=SEEDED)
    exact = drive(engine_of(build_model(tiny_checkpoint())), Add(request)).tokens["r", 0]
    found = drive(engine_of(model, stored=64), Add(request)).tokens["r", 0]
    assert found[0] == exact[0], "a prompt attends exact pages"
    assert found[1] != exact[1]


def test_exact_pages_are_freed_once_they_are_encoded(model: Model) -> None:
    engine = engine_of(model, stored=64)
    record = Record()
    record.add(engine.step([Add(request_of("r", 150, 100))]))
    pages = engine.scheduler.pages
    while not record.output("r"):
        record.add(engine.step([]))
    while engine.has_work:
        [sequence] = engine.scheduler._running
        attended = len(sequence.tokens) - 1
        kept = PLAN.received(attended)[0]
        assert sequence.page_tables[0].count(FREED) == PLAN.received(attended)[1]
        assert pages.total.minus(pages.free) == (kept, PLAN.received(attended)[1])
        assert kept <= PLAN.groups[0].max_held(PAGE)
        record.add(engine.step([]))
    assert len(record.output("r")) == 100
    assert all_free(engine)


@pytest.mark.few(2)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("pages", "stored"), [(16, 64), (64, 16), (17, 17)])
def test_preempted_sequences_produce_the_same_tokens(
    model: Model, sampling: SamplingParams, pages: int, stored: int
) -> None:
    requests = [request_of(f"r{n}", 40 + 30 * n, 120, sampling=sampling) for n in range(4)]
    adds = [Add(request) for request in requests]
    expected = drive(engine_of(model, stored=64), *adds)
    tight = engine_of(model, pages=pages, stored=stored)
    record = Record()
    record.add(tight.step(adds))
    forced = 0
    while tight.has_work:
        record.add(tight.step([]))
        forced = max([forced, *(len(s.forced) for s in tight.scheduler._running)])
    assert forced > 20, "sequences with output were preempted"
    assert record.tokens == expected.tokens
    assert record.finished == expected.finished
    assert all_free(tight)


def test_choices_share_the_stored_pages_of_their_prompt(model: Model) -> None:
    request = request_of("r", 155, 60, sampling=SEEDED, choices=3)
    engine = engine_of(model, stored=64)
    record = Record()
    record.add(engine.step([Add(request)]))
    while not record.output("r"):
        record.add(engine.step([]))
    free = engine.scheduler.pages.free
    assert free[1] == 64 - PLAN.received(155)[1]
    drive(engine, record=record)
    for choice in range(3):
        assert record.tokens["r", choice] == output_by_hand(model, request, choice)
    assert all_free(engine)


@pytest.mark.long
def test_choices_are_preempted_individually(model: Model) -> None:
    request = request_of("r", 100, 100, sampling=SEEDED, choices=4)
    expected = drive(engine_of(model, stored=64), Add(request))
    tight = engine_of(model, pages=24, stored=14)
    assert drive(tight, Add(request)).tokens == expected.tokens
    assert all_free(tight)


@pytest.mark.parametrize("length", [40, 150])
def test_replayed_output_continues_exactly(model: Model, length: int) -> None:
    """After a failover, the new worker gets the prompt and the tokens delivered so far."""
    request = request_of("r", length, 90, sampling=SEEDED)
    whole = drive(engine_of(model, stored=64), Add(request)).tokens["r", 0]
    engine = engine_of(model, stored=64)
    again = replayed(request, [token.token for token in whole[:70]])
    assert drive(engine, Add(again)).tokens["r", 0] == whole[70:]
    assert all_free(engine)


def test_queue_tokens_count_forced_tokens(model: Model) -> None:
    request = replayed(request_of("r", 30, 60), range(40))
    engine = engine_of(model, stored=64)
    for _ in range(10):
        engine.step([Add(request)] if not engine.has_work else [])
        assert engine.scheduler.queue_tokens == 70


def test_requests_that_do_not_fit_are_refused(model: Model) -> None:
    engine = engine_of(model, pages=12, stored=4)
    long = drive(engine, Add(request_of("prompt", 200)), Add(request_of("stored", 180)))
    assert {name: str(fault) for name, fault in long.refused.items()} == {
        "prompt": "200 tokens need 13 of 12 full_precision pages",
        "stored": "180 tokens need 6 of 4 compressed pages",
    }
    grown = drive(engine, Add(request_of("r", 100, 200)))
    assert isinstance(grown.refused["r"], OutOfPages)
    assert len(grown.output("r")) == 160 - 100
    assert all_free(engine)


def test_choices_that_do_not_fit_are_refused_together(model: Model) -> None:
    """The older choice lacks a stored page; the younger one is preempted and fits into no pool."""
    engine = engine_of(model, pages=8, stored=1)
    record = drive(engine, Add(request_of("r", 96, 17, choices=2)))
    assert isinstance(record.refused["r"], OutOfPages)
    assert all_free(engine)


def test_cancelled_requests_return_their_pages(model: Model) -> None:
    engine = engine_of(model, stored=64)
    engine.step([Add(request_of("r", 150, 100, choices=2)), Add(request_of("s", 90, 100))])
    for _ in range(30):
        engine.step([])
    engine.step([Cancel("r"), Cancel("s")])
    assert all_free(engine)


def test_free_pages_of_all_groups_are_reported(model: Model) -> None:
    engine = engine_of(model, pages=40, stored=13)
    assert engine.scheduler.pages.free == engine.scheduler.pages.total == (40, 13)
    for _ in range(8):
        engine.step([] if engine.has_work else [Add(request_of("r", 160, 50))])
    assert PLAN.received(160)[1] == 5
    assert engine.scheduler.pages.free == (40 - 6, 13 - 5)


@pytest.mark.parametrize(
    ("name", "pages", "fault"),
    [
        ("dense", (4, 4), "2 numbers of pages for 1 page groups"),
        ("int4", (4,), "1 numbers of pages for 2 page groups"),
        ("int4", (4, 0), "at least one page"),
    ],
)
@pytest.mark.parametrize("replay", [False, True])
def test_there_must_be_pages_of_all_groups_of_the_format(
    name: str, pages: tuple[int, ...], fault: str, replay: bool
) -> None:
    model = build_model(tiny_checkpoint(), kv_format=name)
    options = EngineOptions(PageCount(*pages), Limits(4, 4, 64, 64), replay=replay)
    with pytest.raises(ValueError, match=fault):
        Engine(LocalExecutor(model, options))
