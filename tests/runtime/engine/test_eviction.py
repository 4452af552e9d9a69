"""Engines with Keyformer eviction: results equal a plain loop, and no page is lost."""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, QueryLog, SequenceSlice
from runtime.core.request import Request, SampledToken, SamplingParams
from runtime.engine import Add, Arrived, Cancel, Engine, Reserve
from runtime.errors import OutOfPages
from runtime.kv import fdc
from runtime.kv.eviction import gumbel_noise, key_scores
from runtime.kv.windowed import WindowedFormat
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.eviction import QUERIES, evicted_tokens
from runtime.pages.plan import pages_for
from runtime.pages.window import SINK_PAGES, first_recent
from tests.runtime.engine.by_hand import GREEDY, SEEDED, all_free, sampled_by_hand
from tests.runtime.kv.calibrated import quantized_spec
from tests.runtime.kv.lowrank import activations, moments_of, orthonormal
from tests.runtime.pages.plans import compressed_plan
from tests.runtime.tiny import (
    CONFIG,
    Record,
    drive,
    executor_of,
    replayed,
    request_of,
    tiny_checkpoint,
)
from tests.runtime.tiny import engine_of as tiny_engine

pytestmark = pytest.mark.slow

PAGE = 16
PLAN = compressed_plan(PAGE)
SHARE = 0.5
FORMATS = ("dense", "k4v2")


@pytest.fixture(scope="module", params=FORMATS)
def model(request: pytest.FixtureRequest) -> Model:
    return build_model(tiny_checkpoint(), kv_format=request.param)


def engine_of(
    model: Model, *, pages: int = 64, stored: int = 64, share: float = SHARE, **options: int
) -> Engine:
    stored *= model.layout.plan.encodes
    replay = bool(options.pop("replay", 0))
    return tiny_engine(
        model,
        pages=pages,
        stored=stored,
        kv_eviction=share,
        replay=replay,
        prefix_root=None,
        **options,
    )


def kept_by_hand(model: Model, cache: object, index: int, log: QueryLog, tokens: int) -> Tensor:
    """Return the tokens that a layer keeps, `[kv_heads, kept]`; pages are 0, 1, 2, …"""
    k_pages = cache.layer(index)[0]  # type: ignore[attr-defined]
    keys = k_pages.transpose(0, 1).flatten(1, 2)[:, :tokens]
    noise = torch.from_numpy(gumbel_noise(tokens, len(keys)))
    scores = key_scores(log.layers[index], keys, noise)
    begin, end = PAGE * SINK_PAGES, PAGE * first_recent(tokens, PAGE)
    best = end - begin - evicted_tokens(tokens, SHARE, PAGE)
    rows = []
    for head in scores:
        ranked = sorted(range(begin, end), key=lambda token: -head[token].item())
        rows.append([*range(begin), *sorted(ranked[:best]), *range(end, tokens)])
    return torch.tensor(rows)


def logits_by_hand(model: Model, request: Request) -> Generator[Tensor, int, None]:
    """Yield logits `[1, vocab]` after the prompt and after each token that is sent.

    What is kept of the prompt is copied to other pages.
    """
    tokens = list(request.tokens)
    count = pages_for(len(tokens) + request.max_tokens, PAGE)
    cache = model.new_cache(model.layout.plan.each(2 * count))
    pages = list(range(count))
    batch = Batch.of([SequenceSlice(tokens, 0, pages)])
    log = QueryLog(torch.arange(max(0, len(tokens) - QUERIES), len(tokens)))
    logits = model.forward(replace(batch, queries=log), cache)
    evicted = evicted_tokens(len(tokens), SHARE, PAGE)
    if evicted:
        pages = list(reversed(range(count, 2 * count)))
        for index in range(model.config.num_layers):
            kept = kept_by_hand(model, cache, index, log, len(tokens))
            assert kept.shape[1] == len(tokens) - evicted
            for plane in cache.layer(index)[:2]:
                for head, row in enumerate(kept.tolist()):
                    for target, source in enumerate(row):
                        plane[pages[target // PAGE], head, target % PAGE] = plane[
                            source // PAGE, head, source % PAGE
                        ]
    stored = list(reversed(range(SINK_PAGES, count)))
    if isinstance(model.kv_format, WindowedFormat):
        ended = torch.arange(SINK_PAGES, first_recent(len(tokens) - evicted, PAGE))
        layers = [cache.layer(index) for index in range(model.config.num_layers)]
        targets = torch.tensor(stored)[ended - SINK_PAGES]
        model.kv_format.encoder(layers).encode(torch.tensor(pages)[ended], targets, ended * PAGE)
    token = yield logits
    while True:
        more = [[-1] * SINK_PAGES + stored] * (len(cache.pages) - 1)
        piece = SequenceSlice([token], len(tokens), pages, more_pages=more, evicted=evicted)
        tokens.append(token)
        token = yield model.forward(Batch.of([piece]), cache)


def output_by_hand(model: Model, request: Request, choice: int = 0) -> list[SampledToken]:
    """Return the output of a choice, without the engine."""
    return sampled_by_hand(logits_by_hand(model, request), request, choice)


@pytest.mark.few(1)
@pytest.mark.parametrize("replay", [0, 1])
def test_output_equals_a_plain_loop(model: Model, replay: int) -> None:
    requests = [
        request_of(f"r{length}", length, 60, sampling=sampling)
        for length, sampling in ((30, GREEDY), (128, SEEDED), (150, GREEDY), (161, SEEDED))
    ]
    together = drive(engine := engine_of(model, replay=replay), *map(Add, requests))
    for request in requests:
        expected = output_by_hand(model, request)
        alone = engine_of(model, replay=replay)
        assert drive(alone, Add(request)).tokens[request.id, 0] == expected
        assert together.tokens[request.id, 0] == expected
        assert all_free(alone)
    assert all_free(engine)


@pytest.mark.parametrize("name", ["fp8", "int4", "stream8", "fdc", "kvquant"])
def test_formats_store_what_is_kept(name: str, tmp_path: Path) -> None:
    if name == "fdc":
        text = [activations(orthonormal(h, 16, 16, seed=h), h) for h in (6, 2, 2)]
        moments = [moments_of(CONFIG, (text[0], text[1], text[2]))] * 2
        fdc.calibrate(moments, fdc.FdcOptions(rank=16), "tiny-0").save(tmp_path / "fdc")
        name = f"fdc:{tmp_path / 'fdc'}"
    elif name == "kvquant":
        name = quantized_spec(name, tmp_path)
    model = build_model(tiny_checkpoint(), kv_format=name)
    request = request_of("r", 190, 60, sampling=SEEDED)
    engine = engine_of(model)
    assert drive(engine, Add(request)).tokens["r", 0] == output_by_hand(model, request)
    assert all_free(engine)


def test_first_token_is_exact_and_later_ones_attend_what_is_kept(model: Model) -> None:
    request = request_of("r", 200, 60, sampling=SEEDED)
    exact = drive(engine_of(model, share=0), Add(request)).tokens["r", 0]
    found = drive(engine_of(model), Add(request)).tokens["r", 0]
    assert found[0] == exact[0]
    assert found[1] != exact[1]


@pytest.mark.few(3)
@pytest.mark.parametrize("chunk", [16, 32, 64, 128, 256])
def test_chunks_do_not_change_what_is_kept(model: Model, chunk: int) -> None:
    """The last chunk may have one token, and QUERIES tokens may be in three chunks."""
    for length in (161, 175, 192):
        request = request_of("r", length, 20, sampling=SEEDED)
        expected = output_by_hand(model, request)
        engine = engine_of(model, step_tokens=chunk, chunk_tokens=chunk)
        assert drive(engine, Add(request)).tokens["r", 0] == expected


@pytest.mark.parametrize("replay", [0, 1])
def test_evicted_pages_are_freed(model: Model, replay: int) -> None:
    engine = engine_of(model, replay=replay)
    record = Record()
    pages = engine.scheduler.pages
    record.add(engine.step([Add(request_of("r", 200, 100))]))
    while not record.output("r"):
        record.add(engine.step([]))
    record.add(engine.step([]))
    kept = 200 - evicted_tokens(200, SHARE, PAGE)
    assert kept == 200 - 96
    held, *compressed = pages.total.minus(pages.free)
    assert compressed == [PLAN.received(kept)[1]] * pages.plan.encodes
    full_precision = pages_for(kept + 2, PAGE) - sum(compressed)
    assert full_precision <= held <= full_precision + 1
    drive(engine, record=record)
    assert len(record.output("r")) == 100
    assert all_free(engine)


@pytest.mark.parametrize("replay", [pytest.param(0, marks=pytest.mark.long), 1])
@pytest.mark.parametrize(
    "sampling",
    [pytest.param(GREEDY, marks=pytest.mark.long, id="greedy"), pytest.param(SEEDED, id="seeded")],
)
@pytest.mark.parametrize("scarce", ["full_precision", "compressed"])
def test_preempted_sequences_produce_the_same_tokens(
    model: Model, sampling: SamplingParams, scarce: str, replay: int
) -> None:
    encodes = model.layout.plan.encodes
    if scarce == "compressed" and not encodes:
        pytest.skip("no compressed pages")
    pages, stored = (14 if encodes else 18, 64) if scarce == "full_precision" else (64, 8)
    lengths = (20, 30, 40, 150) if encodes else (100, 140, 180, 220)
    requests = [request_of(f"r{n}", n, 120, sampling=sampling) for n in lengths]
    adds = [Add(request) for request in requests]
    expected = drive(engine_of(model), *adds)
    tight = engine_of(model, pages=pages, stored=stored, replay=replay)
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


def test_sequences_that_grow_beyond_the_pages_of_their_tokens_are_preempted() -> None:
    """The pages hold the kept tokens of both sequences, but not all of their tokens."""
    model = build_model(tiny_checkpoint())
    requests = [request_of(f"r{n}", 160, 120, sampling=SEEDED) for n in range(2)]
    expected = drive(engine_of(model), *map(Add, requests))
    tight = engine_of(model, pages=14)
    assert pages_for(280, PAGE) > 14
    found = drive(tight, *map(Add, requests))
    assert not found.refused
    assert found.tokens == expected.tokens
    assert all_free(tight)


@pytest.mark.few(2)
@pytest.mark.parametrize("replay", [0, 1])
@pytest.mark.parametrize("length", [155, 160])
def test_choices_share_what_is_kept(model: Model, length: int, replay: int) -> None:
    request = request_of("r", length, 60, sampling=SEEDED, choices=3)
    engine = engine_of(model, replay=replay)
    record = Record()
    record.add(engine.step([Add(request)]))
    while not record.output("r"):
        record.add(engine.step([]))
    kept = length - evicted_tokens(length, SHARE, PAGE)
    first, second, _ = engine.scheduler._running
    assert [table[: kept // PAGE] for table in first.page_tables] == [
        table[: kept // PAGE] for table in second.page_tables
    ]
    drive(engine, record=record)
    for choice in range(3):
        assert record.tokens["r", choice] == output_by_hand(model, request, choice)
    assert all_free(engine)


@pytest.mark.parametrize("length", [40, 150])
def test_replayed_output_continues_exactly(model: Model, length: int) -> None:
    """After a failover, the new worker gets the prompt and the tokens delivered so far."""
    request = request_of("r", length, 90, sampling=SEEDED)
    whole = drive(engine_of(model), Add(request)).tokens["r", 0]
    again = replayed(request, [token.token for token in whole[:70]])
    engine = engine_of(model)
    assert drive(engine, Add(again)).tokens["r", 0] == whole[70:]
    assert all_free(engine)


def transfer(prefill: Engine, decode: Engine, output: Record) -> None:
    """Copy held KV to the pages that the decode engine reserved, in place of the network."""
    [reserved] = [one for step in output.steps for one in step.reserved]
    [computed] = [one for step in output.steps for one in step.computed]
    assert computed.first_token == 0
    pairs = [
        [pair for pair in zip(*tables, strict=True) if pair[1] >= 0]
        for tables in zip(computed.page_tables, reserved.page_tables, strict=True)
    ]
    sent, received = executor_of(prefill).cache, executor_of(decode).cache
    groups = sent.layout.page_groups
    planes = zip(sent.layout.planes, sent.planes, received.planes, strict=True)
    for (_, plane), source, target in planes:
        for one, other in pairs[groups.index(plane.group)]:
            target[other] = source[one]


@pytest.mark.few(6)
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [128, 150, 192])
def test_disaggregated_output_equals_colocated_output(
    model: Model, length: int, sampling: SamplingParams, choices: int
) -> None:
    request = request_of("r", length, 20, sampling=sampling, choices=choices)
    colocated = drive(engine_of(model), Add(request))
    prefill = engine_of(model)
    decode = engine_of(model)
    record = Record()
    drive(decode, Reserve(request), record=record)
    [reserved] = record.steps[0].reserved
    kept = length - evicted_tokens(length, SHARE, PAGE)
    assert len(reserved.page_tables[0]) == pages_for(kept, PAGE)
    first = drive(prefill, Add(request, hold=True))
    record.steps += first.steps
    encoded = PLAN.received(kept)[1] if model.layout.plan.encodes else 0
    held = pages_for(kept, PAGE) - encoded
    assert prefill.scheduler.pages.free[0] == 64 - held, "evicted pages are free"
    transfer(prefill, decode, record)
    tokens = tuple(first.tokens["r", choice][0] for choice in range(choices))
    record.tokens |= first.tokens
    drive(decode, Arrived("r", tokens), record=record)
    drive(prefill, Cancel("r"))
    assert record.tokens == colocated.tokens
    assert all_free(prefill)
    assert all_free(decode)


def test_held_output_is_not_computed_again_with_the_prompt(model: Model) -> None:
    """Known output tokens after the prompt are forced; only what is kept of the prompt is sent."""
    request = replayed(request_of("r", 150, 40), range(10))
    engine = engine_of(model)
    held = drive(engine, Add(request, hold=True))
    [computed] = [one for step in held.steps for one in step.computed]
    assert computed.evicted == evicted_tokens(150, SHARE, PAGE) == 64
    assert computed.num_tokens == 150 - 64
    assert (computed.completes, computed.samples) == (True, False)
    assert not held.tokens


def test_short_prompts_are_computed_with_their_output() -> None:
    """Without eviction and compressed pages, output tokens are prefilled."""
    model = build_model(tiny_checkpoint())
    request = replayed(request_of("r", 100, 90), range(40))
    engine = engine_of(model)
    engine.step([Add(request)])
    [group] = engine.scheduler._prefilling
    assert len(group.tokens) == 140
    assert not group.sequences[0].forced


def test_requests_that_do_not_fit_are_refused(model: Model) -> None:
    engine = engine_of(model, pages=12, stored=2)
    prompt = drive(engine, Add(request_of("prompt", 200)))
    assert str(prompt.refused["prompt"]).startswith("200 tokens need 13 of 12 ")
    if not model.layout.plan.encodes:
        grown = drive(engine, Add(request_of("r", 160, 200)))
        assert isinstance(grown.refused["r"], OutOfPages)
        assert len(grown.output("r")) == 12 * PAGE - (160 - 80) + 1
    assert all_free(engine)


def test_cancelled_requests_return_their_pages(model: Model) -> None:
    engine = engine_of(model)
    engine.step([Add(request_of("r", 170, 100, choices=2)), Add(request_of("s", 190, 100))])
    for steps in (3, 20):
        for _ in range(steps):
            engine.step([])
        engine.step([Cancel("r"), Cancel("s")])
        assert all_free(engine)
        engine.step([Add(request_of("r", 170, 100, choices=2)), Add(request_of("s", 190, 100))])
