"""Scripts of engine commands, run with and without replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st

from runtime.attention.base import Batch, SequenceSlice
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.plan import StepPlan
from runtime.core.request import MAX_LOGPROBS, Request, SampledToken, SamplingParams
from runtime.engine import Add, Arrived, Cancel, Command, Engine, LocalExecutor, Reserve
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from runtime.pages.pool import PagePool
from runtime.sampling.reference import Draw
from runtime.steps.replay import UNRESOLVED, InFlightStep, StepReplay
from tests.runtime.tiny import Record, executor_of, prompt_of, replayed

STOPS = frozenset(range(9, 1300, 50))  # frequent enough that some sequences end with one
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(logprobs=3),
    SamplingParams(temperature=0.8, seed=11),
    SamplingParams(temperature=1.2, top_p=0.9, seed=12, logprobs=0),
    SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.2, seed=13),
    SamplingParams(repetition_penalty=1.2, logit_bias={4: 2.0}),
    SamplingParams(temperature=90.0, seed=14),
    SamplingParams(logprobs=MAX_LOGPROBS),
    SamplingParams(temperature=90.0, top_p=0.99, seed=15, logprobs=2),  # resolved by the host
    SamplingParams(temperature=1.0, seed=16, min_tokens=6, suppressed=STOPS),
]


def engine_of(model: Model, pages: int, running: int, *, replay: bool) -> Engine:
    limits = Limits(max_running=running, max_waiting=64, step_tokens=64, chunk_tokens=32)
    return Engine(LocalExecutor(model, EngineOptions(PageCount(pages), limits, replay=replay)))


def replay_of(engine: Engine) -> StepReplay:
    steps = executor_of(engine).steps
    assert isinstance(steps, StepReplay)
    return steps


def fill(engine: Engine, request: Request, pages: list[int]) -> None:
    """Write the KV of a prompt into pages, as another worker would send it."""
    executor = executor_of(engine)
    cache = executor.model.new_cache(PageCount(len(pages)))
    prompt = SequenceSlice(request.tokens, 0, range(len(pages)))
    executor.model.forward(Batch.of([prompt]), cache)
    for target, source in zip(executor.cache.planes, cache.planes, strict=True):
        target[pages] = source


def play(engine: Engine, script: list[list[Command]]) -> Record:
    """Run a script, a list of commands for each step, until the engine is idle.

    KV arrives one step after its reservation, and held requests are released one step after their
    first token.
    """
    record = Record()
    held = {c.request.id for step in script for c in step if isinstance(c, Add) and c.hold}
    sent = {c.request.id: c.request for step in script for c in step if isinstance(c, Reserve)}
    steps = 0
    arriving: list[Command] = []
    while steps < len(script) or engine.has_work or arriving:
        commands = arriving + (script[steps] if steps < len(script) else [])
        output = engine.step(commands)
        for reserved in output.reserved:
            fill(engine, sent[reserved.id], list(reserved.page_tables[0]))
        arriving = [
            Arrived(reserved.id, tuple(SampledToken(choice, 0, 7 + choice) for choice in range(2)))
            for reserved in output.reserved
        ]
        arriving += [Cancel(name) for name, _ in output.tokens if name in held]
        record.add(output)
        steps += 1
        assert steps < 3000
    assert engine.scheduler.pages.free == engine.scheduler.pages.total
    return record


def compare(found: Record, expected: Record, cancelled: set[str]) -> None:
    """Check that records are equal; output of cancelled and refused requests may be shorter."""
    cut = cancelled | set(found.refused) | set(expected.refused)
    for key in found.tokens.keys() | expected.tokens.keys():
        one, other = found.tokens.get(key, []), expected.tokens.get(key, [])
        if key[0] in cut:
            one, other = one[: len(other)], other[: len(one)]
        assert one == other, key
    for record, against in ((found, expected), (expected, found)):
        for (name, choice), reason in record.finished.items():
            assert name in cut or against.finished[name, choice] is reason
        assert set(record.ended) - cut <= set(against.ended)
        refused = set(record.refused) - cancelled
        assert all(type(record.refused[n]) is type(against.refused[n]) for n in refused)


@dataclass
class Watch:
    """Check that pages used by in-flight steps are not allocated again.

    Attributes:
        in_flight: launched steps, each with the pages that it uses, by pool.
        launches: number of launched steps.
        mixed: number of launched steps with prompt chunks and decoded sequences.
        unresolved: number of draws that were `UNRESOLVED`.
    """

    in_flight: list[tuple[InFlightStep, dict[PagePool, set[int]]]] = field(default_factory=list)
    launches: int = 0
    mixed: int = 0
    unresolved: int = 0

    @contextmanager
    def over(self, engine: Engine) -> Iterator["Watch"]:
        replay = replay_of(engine)
        held = engine.scheduler.pages
        launch, collect = replay.launch, replay.collect

        def launched(plan: StepPlan) -> InFlightStep:
            step = launch(plan)
            assert isinstance(step, InFlightStep)
            prompts = [s for chunk in plan.chunks for s in chunk.group.sequences]
            tables = [s.page_tables for s in plan.decode + prompts if s.page_tables]
            pages = {
                pool: {page for own in tables for page in own[at]}
                for at, pool in enumerate(held.pools)
            }
            self.in_flight.append((step, pages))
            self.launches += 1
            self.mixed += bool(plan.decode and plan.chunks)
            return step

        def collected(step: InFlightStep) -> list[Draw | None]:
            draws = collect(step)
            assert self.in_flight.pop(0)[0] is step, "steps are read in launch order"
            self.unresolved += draws.count(UNRESOLVED)
            return draws

        def watched(pool: PagePool) -> Callable[[int], list[int]]:
            allocate = pool.allocate

            def allocated(count: int) -> list[int]:
                pages = allocate(count)
                for _, busy in self.in_flight:
                    assert busy[pool].isdisjoint(pages), "a page of an in-flight step is allocated"
                return pages

            return allocated

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replay, "launch", launched)
            patch.setattr(replay, "collect", collected)
            for pool in held.pools:
                patch.setattr(pool, "allocate", watched(pool))
            yield self
        assert not self.in_flight


def request(number: int, length: int, tokens: int, kind: int, choices: int) -> Request:
    prompt = prompt_of(length, number)
    stops = STOPS if number % 2 else frozenset()
    return Request(f"r{number}", prompt, length, SAMPLINGS[kind], tokens, stops, choices)


@dataclass(frozen=True)
class Script:
    """Commands for each step.

    Attributes:
        cancelled: ids of the requests that are cancelled.
    """

    steps: list[list[Command]]
    cancelled: frozenset[str]


def scripts(max_steps: int, min_length: int, max_length: int) -> st.SearchStrategy[Script]:
    """Return scripts in which sequences join and leave, or continue after a failover."""
    action = st.sampled_from(["add", "add", "again", "cancel", "wait"])
    length, kind = st.integers(min_length, max_length), st.integers(0, len(SAMPLINGS) - 1)
    drawn = st.tuples(action, length, st.integers(1, 70), kind, st.integers(1, 3))
    return st.lists(drawn, max_size=max_steps).map(_script_of)


def _script_of(drawn: list[tuple[str, int, int, int, int]]) -> Script:
    steps: list[list[Command]] = []
    cancelled = set()
    for number, (action, length, tokens, kind, choices) in enumerate(drawn):
        match action:
            case "add":
                steps.append([Add(request(number, length, tokens, kind, choices))])
            case "again":
                known = [token for token in range(tokens - 1) if token not in STOPS]
                one = request(number, length, tokens, kind, 1)
                steps.append([Add(replayed(one, known))])
            case "cancel":
                cancelled.add(f"r{length % (number + 1)}")
                steps.append([Cancel(f"r{length % (number + 1)}")])
            case _:
                steps.append([])
    return Script(steps, frozenset(cancelled))
