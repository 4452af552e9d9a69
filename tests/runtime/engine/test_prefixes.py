"""Reuse of cached pages: tokens equal those of an engine without a cache, and no page is lost."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.plan import StepPlan
from runtime.core.request import Request, SampledToken, SamplingParams
from runtime.core.sequence import FREED
from runtime.engine import (
    Add,
    Arrived,
    Cancel,
    CancelChoice,
    Command,
    Engine,
    Executor,
    LocalExecutor,
    Reserve,
)
from runtime.engine.prefixes import PrefixCounts
from runtime.errors import NotFinite
from runtime.kv.cache import PagedCache
from runtime.kv.names import CALIBRATED, COMPRESSED, DENSE, LOWRANK
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.count import PageCount
from runtime.pages.prefix import root_hash
from runtime.sampling.reference import Draw
from tests.runtime.engine.by_hand import all_free
from tests.runtime.engine.fake_executor import FakeExecutor, FakeStep
from tests.runtime.engine.mirrored import Mirrored
from tests.runtime.kv.calibrated import calibrated_spec
from tests.runtime.tiny import CONFIG, Record, checkpoint_for, drive, executor_of, prompt_of
from tests.runtime.two_ranks import nothing, two_rank_workers, whole_executor

PAGE = 16
ROOT = root_hash("tiny")
SLIDING = "sliding"
"""Format `dense` of a model whose second layer has a sliding window."""
SEEDED = SamplingParams(temperature=0.8, seed=5)
FORMATS = (DENSE, LOWRANK, SLIDING, *COMPRESSED, *CALIBRATED)


def model_of(name: str, folder: Path | None = None) -> Model:
    """Return the tiny model with a KV format.

    Args:
        folder: where the calibration of a format of `CALIBRATED` is written.
    """
    if name in CALIBRATED:
        assert folder is not None
        return build_model(checkpoint_for(name), kv_format=calibrated_spec(name, folder))
    if name == SLIDING:
        return build_model(checkpoint_for(DENSE, replace(CONFIG, windows=(None, 40))))
    return build_model(checkpoint_for(name), kv_format=name)


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(DENSE)


def engine_of(
    model: Model,
    *,
    cache: bool = True,
    pages: int = 64,
    replay: bool = False,
    eviction: float = 0.0,
) -> Engine:
    options = EngineOptions(
        model.layout.plan.each(pages),
        Limits(max_running=16, max_waiting=64, step_tokens=64, chunk_tokens=32),
        kv_eviction=eviction,
        replay=replay,
        prefix_root=ROOT if cache else None,
    )
    return Engine(LocalExecutor(model, options))


def request(
    name: str, tokens: Sequence[int], max_tokens: int = 8, *, salt: bytes = b"", choices: int = 1
) -> Request:
    return Request(name, tuple(tokens), len(tokens), SEEDED, max_tokens, choices=choices, salt=salt)


def reused(record: Record) -> dict[str, int]:
    return {name: tokens for step in record.steps for name, tokens in step.reused}


def test_a_second_request_computes_only_the_rest_of_its_prompt(model: Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(100)
    cold = drive(engine, Add(request("cold", prompt)))
    warm = drive(engine, Add(request("warm", prompt)))
    assert reused(cold) == {}
    assert reused(warm) == {"warm": 96}
    assert sum(chunk.num_tokens for step in warm.steps for chunk in step.computed) == 100
    assert len(warm.steps) < len(cold.steps)
    assert warm.output("warm") == cold.output("cold")
    counts = engine.scheduler.pages.prefixes.counts
    assert counts == PrefixCounts(200, 96, evicted=PageCount(0), cached=PageCount(6))
    assert all_free(engine)


@pytest.mark.parametrize(("pages", "steps"), [(12, 8), (14, 1)], ids=["prefill", "decode"])
def test_a_preempted_request_is_counted_once(model: Model, pages: int, steps: int) -> None:
    """The last request is preempted, and later finds pages that it computed itself."""
    engine, record = engine_of(model, pages=pages), Record()
    first, second, last = (prompt_of(length, seed=length) for length in (20, 21, 122))
    record.add(engine.step([Add(request("first", first, 60)), Add(request("second", second, 60))]))
    for _ in range(steps):
        record.add(engine.step([]))
    drive(engine, Add(request("last", last, 60)), record=record)
    assert [name for step in record.steps for name in step.started].count("last") == 2
    assert reused(record)["last"] > 0
    counts = engine.scheduler.pages.prefixes.counts
    assert (counts.queried_tokens, counts.reused_tokens) == (20 + 21 + 122, 0)


@pytest.mark.parametrize("replay", [False, True])
def test_prompts_that_arrive_together_compute_their_common_beginning_once(
    model: Model, replay: bool
) -> None:
    beginning = prompt_of(160)
    prompts = [request(str(number), (*beginning, number, 7), 4) for number in range(4)]
    other = request("other", prompt_of(90, 5), 4)
    commands = [Add(each) for each in (*prompts, other)]
    engine = engine_of(model, replay=replay)
    record = drive(engine, *commands)
    assert record.tokens == drive(engine_of(model, cache=False, replay=replay), *commands).tokens
    assert reused(record) == dict.fromkeys("123", 160)
    assert all_free(engine)
    started = [name for step in record.steps for name in step.started]
    assert started.index("other") <= 1, "it does not wait with the others"


def test_prompts_that_fit_into_one_step_do_not_wait_for_each_other(model: Model) -> None:
    beginning = prompt_of(20)
    engine = engine_of(model)
    record = drive(engine, *(Add(request(name, (*beginning, 1), 4)) for name in "ab"))
    assert reused(record) == {}
    assert record.steps[0].started == ["a", "b"]


def test_prompts_continue_if_the_one_that_computes_their_beginning_is_cancelled(
    model: Model,
) -> None:
    beginning = prompt_of(160)
    prompts = [request(name, (*beginning, number), 4) for number, name in enumerate("abc")]
    engine = engine_of(model)
    first = Record()
    for step in ([Add(each) for each in prompts], [], [Cancel("a")]):
        first.add(engine.step(step))
    record = drive(engine)
    # Each step computes at most 32 tokens of a prompt.
    assert reused(first) | reused(record) == {"b": 64, "c": 160}
    cold = drive(engine_of(model, cache=False), *(Add(each) for each in prompts[1:]))
    assert {key: first.tokens.get(key, []) + record.tokens[key] for key in cold.tokens} == (
        cold.tokens
    )
    assert all_free(engine)


def test_the_next_turn_reuses_the_answer(model: Model) -> None:
    engine, cold = engine_of(model), engine_of(model, cache=False)
    prompt = list(prompt_of(50))
    before = 0
    for turn in range(4):
        name = f"turn-{turn}"
        record = drive(engine, Add(request(name, prompt, 30)))
        expected = drive(cold, Add(request(name, prompt, 30)))
        assert record.tokens == expected.tokens
        if turn:
            # The last token of the answer has no KV.
            assert reused(record) == {name: (before + 29) // PAGE * PAGE}
        before = len(prompt)
        prompt += [*record.output(name), *prompt_of(9, seed=turn)]
    assert all_free(engine)


def test_requests_with_other_salts_share_nothing(model: Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(100)
    for salt in (b"", b"a", b"b"):
        assert reused(drive(engine, Add(request("first", prompt, salt=salt)))) == {}
    for salt in (b"", b"a", b"b"):
        again = drive(engine, Add(request("again", prompt, salt=salt)))
        assert reused(again) == {"again": 96}


def test_a_running_prompt_is_shared_before_it_ends(model: Model) -> None:
    """Requests share the pages of chunks whose steps have completed."""
    engine = engine_of(model, pages=18)
    prompt = prompt_of(200)
    record = Record()
    record.add(engine.step([Add(request("a", prompt, 40))]))
    while not record.output("a"):
        record.add(engine.step([]))
    record.add(engine.step([Add(request("b", prompt, 40))]))
    assert reused(record) == {"b": 192}
    [a, b] = (s.page_tables[0] for s in engine.scheduler._running)
    assert a[:12] == b[:12]
    assert not set(a[12:]) & set(b[12:]), "pages that are written are not shared"
    drive(engine, record=record)
    assert record.output("a") == record.output("b")
    assert not record.refused
    assert all_free(engine)


def test_shared_pages_let_more_requests_run(model: Model) -> None:
    """Two prompts of 13 pages fit into 18 pages, because they share 12."""
    engine = engine_of(model, pages=18)
    prompt = prompt_of(200)
    drive(engine, Add(request("a", prompt, 4)))
    engine.step([Add(request("b", prompt, 40)), Add(request("c", prompt, 40))])
    engine.step([])
    assert engine.scheduler.num_running == 2


def test_sequences_that_may_be_damaged_are_not_found() -> None:
    class Broken(FakeExecutor):
        """Samples logits that are not finite for prompts of 70 tokens."""

        def launch(self, plan: StepPlan) -> FakeStep:
            return BrokenStep(len(plan.sampled), any(len(s.tokens) == 70 for s in plan.sampled))

    class BrokenStep(FakeStep):
        def read(self) -> list[Draw | None]:
            return [None] * self.sampled if self.ready else super().read()

    executor = Broken(16, Limits(4, 4, step_tokens=32, chunk_tokens=32))
    executor.shape = replace(
        executor.shape, options=replace(executor.shape.options, prefix_root=ROOT)
    )
    engine = Engine(executor)
    prompt = prompt_of(70)
    record = drive(engine, Add(request("damaged", prompt, choices=3)))
    assert isinstance(record.refused["damaged"], NotFinite)
    assert engine.scheduler.pages.pools[0].cached == 0
    assert reused(drive(engine, Add(request("next", [*prompt, 1])))) == {}
    assert all_free(engine)


def test_prompts_with_evicted_tokens_share_nothing(model: Model) -> None:
    engine = engine_of(model, eviction=0.25)
    for name in ("first", "second"):
        assert reused(drive(engine, Add(request(name, prompt_of(150))))) == {}
    assert engine.scheduler.pages.pools[0].cached == 0
    short = [drive(engine, Add(request(name, prompt_of(90)))) for name in ("third", "fourth")]
    assert [reused(record) for record in short] == [{}, {"fourth": 80}]


def test_pages_in_flight_are_not_found(model: Model) -> None:
    engine = engine_of(model, replay=True)
    engine.step([Add(request("a", prompt_of(30)))])
    pools = engine.scheduler.pages.pools
    assert not pools[0]._pages, "the step may not have completed"
    engine.step([])
    assert len(pools[0]._pages) == 1


def test_a_reservation_reuses_at_most_what_it_may(model: Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(100)
    drive(engine, Add(request("a", prompt)))
    assert engine.scheduler.cached_tokens(request("b", prompt)) == 96
    assert engine.scheduler.cached_tokens(request("b", prompt, salt=b"s")) == 0
    for name, may_reuse, first in (("b", None, 96), ("c", 32, 32), ("d", 0, 0), ("e", 999, 96)):
        [reserved] = engine.step([Reserve(request(name, prompt), may_reuse)]).reserved
        assert reserved.first_token == first
    for name in "bcde":
        engine.step([Cancel(name)])
    assert all_free(engine)


def test_reserved_pages_are_found_only_after_their_arrival(model: Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(100)
    engine.step([Reserve(request("a", prompt))])
    assert engine.scheduler.cached_tokens(request("b", prompt)) == 0
    engine.step([Cancel("a")])
    assert engine.scheduler.cached_tokens(request("b", prompt)) == 0
    engine.step([Reserve(request("c", prompt))])
    engine.step([Arrived("c", (SampledToken(0, 0, 7),))])
    assert engine.scheduler.cached_tokens(request("b", prompt)) == 96
    drive(engine)
    assert all_free(engine)


def cache_of(engine: Engine) -> PagedCache:
    return executor_of(engine).cache


def carry(sender: Engine, receiver: Engine, one: Request, record: Record) -> int:
    """Prefill on one engine and decode on another; return the number of tokens not sent."""
    held = drive(sender, Add(one, hold=True))
    [reserved] = receiver.step([Reserve(one)]).reserved
    tables: list[list[int]] = [[] for _ in reserved.page_tables]
    for chunk in (chunk for step in held.steps for chunk in step.computed):
        pages = cache_of(sender).layout.plan.pages(chunk.first_token + chunk.num_tokens)
        for table, found in zip(tables, chunk.page_tables, strict=True):
            table += found
            table += [FREED] * (pages - len(table))  # the last pages are not encoded
    source, target = cache_of(sender), cache_of(receiver)
    layout = source.layout
    for layer, planes in enumerate(layout.layers):
        stored = zip(planes, source.layer(layer), target.layer(layer), strict=True)
        for plane, mine, theirs in stored:
            at = layout.plan.groups.index(plane.group)
            for part in layout.plan.sent(len(one.tokens), at):
                for page in range(max(part.start, reserved.first_token // PAGE), part.stop):
                    theirs[reserved.page_tables[at][page]] = mine[tables[at][page]]
    first = tuple(token for step in held.steps for _, token in step.tokens)
    for token in first:
        record.tokens.setdefault((one.id, token.choice), []).append(token)
    ended = {choice for step in held.steps for _, choice, _ in step.finished}
    assert not ended
    drive(receiver, Arrived(one.id, first), record=record)
    sender.step([Cancel(one.id)])
    return reserved.first_token


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [DENSE, SLIDING, "fp8", "k4v2", "stream4"])
def test_only_missing_pages_are_received(name: str) -> None:
    """Both workers cache; pages that are not sent hold the same bytes."""
    model = model_of(name)
    cold = engine_of(model, cache=False)
    sender, receiver = engine_of(model, pages=80), engine_of(model, pages=80)
    prompt = list(prompt_of(150))
    firsts = []
    for turn in range(3):
        one = request(f"t{turn}", prompt, 30, choices=1 + turn % 2)
        record = Record()
        firsts.append(carry(sender, receiver, one, record))
        assert record.tokens == drive(cold, Add(one)).tokens
        prompt += [*record.output(one.id), *prompt_of(20, seed=turn)]
    # The window of the first prompt is not encoded there: 64 tokens, from page 5 on.
    encodes = model.layout.plan.encodes
    assert firsts == ([0, 80, 128] if encodes else [0, 176, 224])
    assert all_free(sender)
    assert all_free(receiver)


@dataclass
class Chats:
    """Random requests with common prefixes: chats, forks of chats, choices and cancellations.

    Attributes:
        prompts: prompts and answers so far, from which others start.
    """

    rng: random.Random
    prompts: list[list[int]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def commands(self, step: int) -> list[Command]:
        rng = self.rng
        commands: list[Command] = []
        if rng.random() < 0.25:
            earlier = rng.choice(self.prompts) if self.prompts and rng.random() < 0.8 else []
            kept = earlier[: rng.randint(0, len(earlier))] if rng.random() < 0.3 else earlier
            added = [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(1, 60))]
            tokens = (kept + added)[-230:]
            self.prompts.append(tokens)
            one = replace(
                request(f"r{step}", tokens, rng.randint(1, 40), choices=rng.choice((1, 1, 4))),
                sampling=SamplingParams(temperature=rng.choice((0.0, 0.9)), seed=step),
            )
            self.requests.append(one)
            commands.append(Add(one))
        if self.requests and rng.random() < 0.03:
            commands.append(Cancel(rng.choice(self.requests).id))
        if self.requests and rng.random() < 0.05:
            commands.append(CancelChoice(rng.choice(self.requests).id, rng.randrange(4)))
        return commands

    def learn(self, record: Record) -> None:
        """Continue from answers, too."""
        for one in self.requests:
            if self.rng.random() < 0.1 and (output := record.output(one.id)):
                self.prompts.append([*one.tokens, *output])


def play(engine: Engine, script: list[list[Command]]) -> Record:
    record = Record()
    for commands in script:
        record.add(engine.step(commands))
    return drive(engine, record=record)


def script_of(model: Model, seed: int, steps: int) -> list[list[Command]]:
    """Return the commands of each step; later prompts contain answers of an engine that is cold."""
    chats, engine = Chats(random.Random(seed)), engine_of(model, cache=False, pages=200)
    record, script = Record(), []
    for step in range(steps):
        script.append(chats.commands(step))
        record.add(engine.step(script[-1]))
        chats.learn(record)
    return script


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", [DENSE, SLIDING, "k4v2"])
def test_other_ranks_get_the_shared_pages(name: str, replay: bool) -> None:
    """Another rank computes decoded copies of the plans; its pages have the same KV."""
    model = model_of(name)
    script = script_of(model, 3, 80)
    engine = engine_of(model, pages=30, replay=replay)
    executor = Mirrored(model, engine.executor.shape.options)
    mirrored = play(Engine(executor), script)
    executor.check_equal()
    assert len(reused(mirrored)) > 5
    assert mirrored.tokens == play(engine, script).tokens


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_reuse_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    options = EngineOptions(
        PageCount(40), Limits(4, 8, step_tokens=64, chunk_tokens=32), prefix_root=ROOT
    )

    def chat(executor: Executor) -> list[list[int]]:
        engine, prompt, outputs = Engine(executor), list(prompt_of(70)), []
        for turn in range(3):
            record = drive(engine, Add(request(f"{turn}", prompt, 20, choices=1 + turn)))
            assert bool(reused(record)) == bool(turn)
            outputs.append([t for c in range(1 + turn) for t in record.output(f"{turn}", c)])
            prompt += [*record.output(f"{turn}"), *prompt_of(7)]
        return outputs

    expected = chat(whole_executor(options, CONFIG.vocab_size))
    rendezvous = str(tmp_path / "rendezvous")
    with two_rank_workers(rendezvous, options, nothing, vocab=CONFIG.vocab_size) as (two,):
        assert chat(two.executor) == expected


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("steps", [30, pytest.param(150, marks=pytest.mark.long)])
@pytest.mark.parametrize("replay", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", FORMATS)
def test_random_chats_produce_the_tokens_of_a_cold_engine(
    name: str, replay: bool, steps: int, tmp_path: Path
) -> None:
    """One run has ample pages, the other so few that it evicts pages and preempts sequences."""
    model = model_of(name, tmp_path)
    torch.manual_seed(0)
    for seed, pages in ((1, 200), (2, 24)):
        script = script_of(model, seed, steps)
        cold = play(engine_of(model, cache=False, pages=pages, replay=replay), script)
        engine = engine_of(model, pages=pages, replay=replay)
        warm = play(engine, script)
        for one in (c.request for commands in script for c in commands if isinstance(c, Add)):
            for choice in range(one.choices):
                expected, found = cold.output(one.id, choice), warm.output(one.id, choice)
                least = min(len(expected), len(found))  # one of them may be cancelled earlier
                assert found[:least] == expected[:least]
        assert len(reused(warm)) >= steps // 30
        assert all_free(engine)
        again = play(engine_of(model, pages=pages, replay=replay), script)
        assert list(map(str, again.steps)) == list(map(str, warm.steps)), "deterministic"


def test_an_allocation_does_not_evict_the_pages_that_were_just_found(model: Model) -> None:
    """The prompt needs every page, and its prefix was freed before all others."""
    engine = engine_of(model, pages=12)
    prompt = prompt_of(100)
    first = drive(engine, Add(request("first", prompt)))
    drive(engine, Add(request("other", prompt_of(80, seed=1), 1)))
    assert engine.scheduler.pages.pools[0].cached == 11
    longer = [*prompt, *first.output("first"), *prompt_of(70, seed=2)]
    warm = drive(engine, Add(request("longer", longer, 3)))
    expected = drive(engine_of(model, cache=False), Add(request("longer", longer, 3)))
    assert reused(warm) == {"longer": 96}
    assert warm.tokens == expected.tokens
    assert engine.scheduler.pages.prefixes.counts.evicted == PageCount(5)
    assert all_free(engine)


def test_the_index_has_at_most_one_entry_for_each_page(model: Model) -> None:
    engine = engine_of(model, pages=12)
    for number in range(40):
        drive(engine, Add(request(f"{number}", prompt_of(100, seed=number), 1)))
    [pool] = engine.scheduler.pages.pools
    assert len(pool._pages) <= pool.total
    assert pool.cached + len(pool._blank) == pool.total
