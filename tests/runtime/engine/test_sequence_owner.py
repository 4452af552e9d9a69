"""Only the scheduler changes sequences: executors compute copies of step plans."""

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.plan import Chunk, StepPlan
from runtime.core.request import SamplingParams
from runtime.core.sequence import Purpose, SequenceGroup
from runtime.engine import Add, Cancel, Command, Engine, LocalExecutor
from runtime.engine.executor import LaunchedStep
from runtime.engine.pages import SequencePages
from runtime.engine.scheduler import Scheduler
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.eviction import evicted_tokens
from runtime.pages.plan import PageCount, PagePlan
from tests.runtime.pages.plans import compressed_plan
from tests.runtime.tiny import Record, drive, replayed, request_of, tiny_checkpoint

ROOT = Path(__file__).parents[3]
LIMITS = Limits(max_running=6, max_waiting=16, step_tokens=64, chunk_tokens=32)
SEEDED = SamplingParams(temperature=0.9, seed=3, logprobs=1)
SHARE = 0.25
"""Fraction of prompts to evict, so small that pages with candidates are kept."""
OWNED = {"computed", "evicted", "page_tables"}
"""Attributes of sequences and groups that say what their pages hold."""


class Copied(LocalExecutor):
    """Computes copies of plans, as a rank in another process does."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        copy: StepPlan = pickle.loads(pickle.dumps(plan))
        before = pickle.dumps(copy)
        step = super().launch(copy)
        assert pickle.dumps(copy) == before, "an executor changed a plan"
        return step


def engine_of(executor: type[LocalExecutor], model: Model, *, replay: bool) -> Engine:
    """Return an engine with so few pages that sequences are preempted."""
    pages = PageCount(30, 12) if model.layout.plan.encodes else PageCount(30)
    options = EngineOptions(pages, LIMITS, kv_eviction=SHARE, replay=replay)
    return Engine(executor(model, options))


def run(engine: Engine) -> Record:
    """Prefill, evict, decode, preempt, hold, continue after a failover, and cancel."""
    first: list[Command] = [
        Add(request_of("a", 150, 50, seed=1)),
        Add(request_of("b", 161, 50, sampling=SEEDED, choices=2, seed=2)),
        Add(request_of("held", 140, 8, sampling=SEEDED, seed=3), hold=True),
        Add(request_of("c", 20, 50, sampling=SEEDED, seed=4)),
    ]
    record = Record()
    record.add(engine.step(first))
    for _ in range(4):
        record.add(engine.step([]))
    again = replayed(request_of("again", 130, 50, sampling=SEEDED, seed=5), range(12))
    record.add(engine.step([Cancel("a"), Add(again)]))
    drive(engine, record=record)
    engine.step([Cancel("held")])
    assert engine.scheduler.pages.free == engine.scheduler.pages.total
    return record


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_format", "replay"), [("dense", False), ("dense", True), ("k4v2", True)]
)
def test_executors_of_copied_plans_compute_the_same(kv_format: str, replay: bool) -> None:
    model = build_model(tiny_checkpoint(), kv_format=kv_format)
    expected = run(engine_of(LocalExecutor, model, replay=replay))
    found = run(engine_of(Copied, model, replay=replay))
    assert found.tokens == expected.tokens
    assert found.finished == expected.finished
    assert [step.computed for step in found.steps] == [step.computed for step in expected.steps]
    started = [name for step in found.steps for name in step.started]
    assert len(started) > len(set(started)), "a sequence was preempted"


def changes(path: Path) -> Iterator[str]:
    """Yield the names of `OWNED` attributes of other objects that a module changes."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(ast.Name("self")):
                continue
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) if name in OWNED:
                yield name
            case ast.Attribute(ast.Attribute(attr="page_tables"), "append" | "clear" | "pop"):
                yield "page_tables"


def test_one_module_changes_what_pages_hold() -> None:
    folders = ("core", "engine", "steps", "pages")
    paths = [path for folder in folders for path in (ROOT / "runtime" / folder).glob("*.py")]
    found = {path.name: set(changes(path)) for path in paths}
    del found["plan_deltas.py"]  # it changes the copies that other ranks have
    assert {name: names for name, names in found.items() if names} == {"pages.py": OWNED}


def test_computed_tokens_change_in_one_statement() -> None:
    found = list(changes(ROOT / "runtime/engine/pages.py"))
    assert found.count("computed") == 1


def group_of(purpose: Purpose, tokens: int, *, choices: int = 1) -> SequenceGroup:
    request = request_of("r", tokens, 20, choices=choices)
    evicts = evicted_tokens(tokens, SHARE, 16)
    return SequenceGroup.of(request, purpose, 0, limit=tokens + 20, evicts=evicts)


@pytest.mark.parametrize("plan", [PagePlan(16), compressed_plan()], ids=["dense", "compressed"])
@pytest.mark.parametrize("purpose", [Purpose.GENERATE, Purpose.HOLD])
def test_complete_prompt_keeps_pages_without_evicted_tokens(
    plan: PagePlan, purpose: Purpose
) -> None:
    pages = SequencePages(plan, plan.each(40))
    group = group_of(purpose, 150)
    [sequence] = group.sequences
    pages.admit(group)
    before = [list(table) for table in sequence.page_tables]
    pages.set_computed(group, 128)
    assert (sequence.evicted, sequence.page_tables) == (0, before)
    chunk = Chunk(group, 128, 22, vacated=range(3, 5))
    expected = chunk.prompt
    pages.set_computed(group, chunk.end, chunk.vacated)
    assert sequence.evicted == expected.evicted == 32
    assert sequence.page_tables == expected.page_tables
    assert sequence.page_tables[0] == before[0][:3] + before[0][5:]
    pages.release([sequence])
    assert pages.free == pages.total


def test_received_prompt_has_no_pages_for_evicted_tokens() -> None:
    pages = SequencePages(PagePlan(16), PageCount(40))
    group = group_of(Purpose.RECEIVE, 150, choices=2)
    pages.admit(group)
    tables = [list(sequence.page_tables[0]) for sequence in group.sequences]
    assert [len(table) for table in tables] == [8, 8]
    pages.set_computed(group, 150)
    assert [sequence.evicted for sequence in group.sequences] == [32, 32]
    assert [sequence.page_tables[0] for sequence in group.sequences] == tables


def test_sequences_of_an_engine_have_distinct_arrivals() -> None:
    """Executors know sequences by their arrival, also if a request id is used again."""
    arrivals = []
    scheduler = Scheduler(LIMITS, plan=PagePlan(16), total=PageCount(40), context_length=400)
    for choices in (3, 1, 2):
        scheduler.submit(request_of("r", 20, choices=choices), Purpose.GENERATE)
        [chunk] = scheduler.plan().chunks
        arrivals.append([sequence.arrival for sequence in chunk.group.sequences])
        scheduler.drop("r")
    assert arrivals == [[0, 1, 2], [3], [4, 5]]
