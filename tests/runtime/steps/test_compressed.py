"""Replay with formats other than `dense` gives the bits of steps without replay."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.engine import Add, Command, Engine, LocalExecutor
from runtime.kv.names import LOWRANK
from runtime.kv.registry import COMPRESSED
from runtime.models.build import build_model
from runtime.models.model import Model
from tests.runtime.steps.scripts import Script, Watch, compare, play, request, scripts
from tests.runtime.tiny import CONFIG, checkpoint_for, pages_of, replayed

pytestmark = pytest.mark.slow

TINY = replace(CONFIG, num_layers=1, vocab_size=1300)


@pytest.fixture(scope="module", params=["k4v2", LOWRANK])
def compressed(request: pytest.FixtureRequest) -> Model:
    return built(request.param)


def built(name: str) -> Model:
    return build_model(checkpoint_for(name, TINY), kv_format=name)


def engines(model: Model, pages: int, stored: int, running: int) -> Iterator[Engine]:
    """Yield an engine without replay and one with replay."""
    limits = Limits(max_running=running, max_waiting=64, step_tokens=64, chunk_tokens=32)
    for replay in (False, True):
        options = EngineOptions(pages_of(model.layout, pages, stored), limits, replay=replay)
        yield Engine(LocalExecutor(model, options))


def check(
    model: Model,
    script: list[list[Command]],
    *,
    pages: int,
    stored: int,
    running: int = 4,
    cancelled: frozenset[str] = frozenset(),
) -> Watch:
    """Compare the output of a script with and without replay; check that all pages return."""
    plain, replayed = engines(model, pages, stored, running)
    expected = play(plain, script)
    with Watch().over(replayed) as watch:
        compare(play(replayed, script), expected, set(cancelled))
    for engine in (plain, replayed):
        held = engine.scheduler.pages
        assert held.free == held.total
    return watch


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*COMPRESSED, LOWRANK])
def test_output_equals_output_without_replay(name: str) -> None:
    model = built(name)
    script: list[list[Command]] = [[], [], [], [], []]
    for number, length in enumerate((70, 150, 12, 95, 200)):
        script[number].append(Add(request(2 * number, length, 60, number, 1 + number % 2)))
    watch = check(model, script, pages=64, stored=64)
    assert watch.mixed > 3, "prompts were computed beside sequences with stored pages"


@pytest.mark.few(1)
@pytest.mark.parametrize(("pages", "stored"), [(17, 64), (64, 16)])
def test_preempted_sequences_are_computed_again(compressed: Model, pages: int, stored: int) -> None:
    adds = [Add(request(2 * n, 40 + 30 * n, 120, (0, 2, 4, 8)[n], 1)) for n in range(4)]
    check(compressed, [list(adds)], pages=pages, stored=stored)


@pytest.mark.few(1)
def test_slots_that_did_not_advance_keep_the_page_that_leaves_the_window(
    compressed: Model,
) -> None:
    """The host draws most tokens, so steps launched ahead compute the same position again."""
    script: list[list[Command]] = [
        [Add(request(0, 60, 100, 8, 2)), Add(request(2, 90, 90, 0, 1))],
        [Add(request(4, 100, 80, 8, 1))],
    ]
    watch = check(compressed, script, pages=64, stored=64)
    assert watch.unresolved > 50


@pytest.mark.few(1)
def test_replayed_output_is_forced_beside_running_sequences(compressed: Model) -> None:
    whole = [request(2 * n, 50 + 40 * n, 80, kind, 1) for n, kind in enumerate((2, 8, 4))]
    plain, _ = engines(compressed, 64, 64, 4)
    outputs = play(plain, [[Add(r) for r in whole]])
    script: list[list[Command]] = [[], [], [], [], []]
    for at, one in enumerate(whole):
        script[at].append(Add(replayed(one, outputs.output(one.id)[:60])))
    script[3].append(Add(request(20, 70, 70, 1, 1)))
    check(compressed, script, pages=64, stored=64)
    _, replay = engines(compressed, 64, 64, 4)
    found = play(replay, script)
    for one in whole:
        assert found.output(one.id) == outputs.output(one.id)[60:]


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=40)
@given(
    script=scripts(12, 1, 170),
    pages=st.integers(6, 30),
    stored=st.integers(1, 30),
    running=st.integers(1, 6),
)
def test_random_scripts(
    compressed: Model, script: Script, pages: int, stored: int, running: int
) -> None:
    """Sequences join, leave, grow, are preempted, and continue after a failover."""
    check(
        compressed,
        script.steps,
        pages=pages,
        stored=stored,
        running=running,
        cancelled=script.cancelled,
    )
