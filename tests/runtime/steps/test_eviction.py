"""Replay with eviction gives the same tokens as steps without replay, bit for bit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.plan import Chunk
from runtime.core.sequence import Purpose, SequenceGroup, SequenceState
from runtime.engine import Add, Cancel, Command, Engine, LocalExecutor
from runtime.models.build import build_model
from runtime.pages.plan import PageCount
from runtime.steps.direct import DirectSteps
from runtime.steps.eviction import PromptEviction
from tests.runtime.steps.scripts import Script, Watch, compare, play, request, scripts
from tests.runtime.tiny import CONFIG, executor_of, pages_of, tiny_checkpoint

pytestmark = pytest.mark.slow

TINY = replace(CONFIG, num_layers=1, vocab_size=1300)
FORMATS = ("dense", "k4v2")
MODELS = {name: build_model(tiny_checkpoint(config=TINY), kv_format=name) for name in FORMATS}


def check(
    name: str,
    script: list[list[Command]],
    *,
    pages: int = 64,
    stored: int = 64,
    running: int = 4,
    cancelled: frozenset[str] = frozenset(),
) -> Watch:
    """Compare the output of a script with and without replay; check that all pages return."""
    limits = Limits(max_running=running, max_waiting=64, step_tokens=64, chunk_tokens=32)
    count = pages_of(MODELS[name].layout, pages, stored)
    options = EngineOptions(count, limits, kv_eviction=0.5)
    plain, replayed = (
        Engine(LocalExecutor(MODELS[name], replace(options, replay=replay)))
        for replay in (False, True)
    )
    expected = play(plain, script)
    with Watch().over(replayed) as watch:
        compare(play(replayed, script), expected, set(cancelled))
    for engine in (plain, replayed):
        held = engine.scheduler.pages
        assert held.free == held.total
    return watch


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_are_evicted_beside_running_sequences(name: str) -> None:
    script: list[list[Command]] = [[] for _ in range(16)]
    for number, length in enumerate((130, 150, 12, 195, 200)):
        script[3 * number].append(Add(request(2 * number, length, 60, number, 1 + number % 2)))
    assert check(name, script).mixed > 3


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FORMATS)
def test_slots_that_did_not_advance_attend_what_their_prompt_attended(name: str) -> None:
    """The host draws most tokens, also the first ones, which attend evicted tokens."""
    script: list[list[Command]] = [
        [Add(request(0, 140, 100, 8, 2)), Add(request(2, 190, 90, 0, 1))],
        [Add(request(4, 160, 80, 8, 1)), Add(request(6, 130, 60, 8, 1), hold=True)],
    ]
    assert check(name, script, running=6).unresolved > 50


def test_passes_without_evicted_prompts_log_no_queries() -> None:
    model = MODELS["dense"]
    evictions = PromptEviction(model, model.new_cache(PageCount(1)))

    def chunk(first: int, count: int, evicts: int) -> Chunk:
        one = request(0, 200, 8, 0, 1)
        sequence = SequenceState(one, 0, 0, list(one.tokens), 208, evicts=evicts)
        return Chunk(SequenceGroup(Purpose.GENERATE, [sequence]), first, count)

    assert evictions.log([chunk(0, 200, 0)]) is None
    assert evictions.log([chunk(0, 160, 96)]) is None
    log = evictions.log([chunk(0, 176, 96), chunk(160, 40, 0), chunk(192, 8, 96)])
    assert log is not None
    assert log.rows.tolist() == [*range(168, 176), *range(216, 224)]


def test_queries_of_dropped_prompts_are_forgotten() -> None:
    """A prompt is cancelled after a chunk with some of the last queries."""
    limits = Limits(max_running=4, max_waiting=4, step_tokens=16, chunk_tokens=16)
    options = EngineOptions(PageCount(64), limits, kv_eviction=0.5)
    engine = Engine(LocalExecutor(MODELS["dense"], options))
    steps = executor_of(engine).steps
    assert isinstance(steps, DirectSteps)
    engine.step([Add(request(0, 161, 8, 0, 1))])
    for _ in range(8):
        assert not steps._eviction._queries
        engine.step([])
    assert len(steps._eviction._queries) == 1
    engine.step([Cancel("r0"), Add(request(2, 20, 8, 0, 1))])
    assert not steps._eviction._queries


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(
    script=scripts(10, 90, 250),
    pages=st.integers(10, 40),
    stored=st.integers(1, 30),
    running=st.integers(1, 6),
)
def test_random_scripts(name: str, script: Script, pages: int, stored: int, running: int) -> None:
    """Sequences join, leave, grow, are preempted, and continue after a failover."""
    check(
        name, script.steps, pages=pages, stored=stored, running=running, cancelled=script.cancelled
    )
