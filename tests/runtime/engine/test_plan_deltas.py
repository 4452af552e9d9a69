"""Plans that a second rank decodes equal those of the engine, and give the same tokens and KV."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.engine import Add, Command, Engine
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from tests.runtime.engine import test_sequence_owner
from tests.runtime.engine.mirrored import Mirrored
from tests.runtime.engine.test_engine_random import ACTIONS, Driver, check_end
from tests.runtime.steps.scripts import SAMPLINGS
from tests.runtime.tiny import CONFIG, drive, request_of, tiny_checkpoint

LIMITS = Limits(max_running=6, max_waiting=16, step_tokens=64, chunk_tokens=32)
SLIDING = replace(CONFIG, vocab_size=1300, windows=(None, 20))


def model_of(kind: str) -> Model:
    """Return a model with one page group, or several."""
    if kind == "sliding":
        return build_model(tiny_checkpoint(config=SLIDING))
    return build_model(tiny_checkpoint(), kv_format=kind)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {kind: model_of(kind) for kind in ("dense", "sliding", "k4v2")}


def mirrored_engine(
    model: Model, pages: int, *, replay: bool, limits: Limits = LIMITS, kv_eviction: float = 0.0
) -> tuple[Engine, Mirrored]:
    executor = Mirrored(
        model,
        EngineOptions(
            model.layout.plan.each(pages), limits, kv_eviction=kv_eviction, replay=replay
        ),
    )
    return Engine(executor), executor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "replay"), [("dense", False), ("dense", True), ("k4v2", False), ("k4v2", True)]
)
def test_decoded_plans_of_evicted_preempted_and_forced_sequences(kind: str, replay: bool) -> None:
    model = model_of(kind)
    pages = PageCount(30, 12) if model.layout.plan.encodes else PageCount(30)
    executor = Mirrored(
        model, EngineOptions(pages, LIMITS, kv_eviction=test_sequence_owner.SHARE, replay=replay)
    )
    record = test_sequence_owner.run(Engine(executor))
    executor.check_equal()
    started = [name for step in record.steps for name in step.started]
    assert len(started) > len(set(started)), "a sequence was preempted"


@pytest.mark.slow
@pytest.mark.parametrize("replay", [False, True])
def test_decoded_plans_of_sliding_windows_and_all_sampling_parameters(replay: bool) -> None:
    engine, executor = mirrored_engine(model_of("sliding"), 40, replay=replay)
    commands: list[Command] = [
        Add(request_of(str(n), 20 + 13 * n, 24, sampling=sampling, choices=1 + n % 3, seed=n))
        for n, sampling in enumerate(SAMPLINGS)
    ]
    record = drive(engine, *commands)
    assert len(record.ended) == len(SAMPLINGS)
    executor.check_equal()


@pytest.mark.slow
@settings(max_examples=20)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(ACTIONS), st.integers(1, 70), st.integers(1, 40), st.integers(1, 3)
        ),
        max_size=40,
    ),
    pages=st.integers(3, 14),
    max_running=st.integers(1, 6),
    kind=st.sampled_from(["dense", "sliding", "k4v2"]),
    replay=st.booleans(),
)
def test_decoded_plans_of_random_commands(
    models: dict[str, Model],
    actions: list[tuple[str, int, int, int]],
    pages: int,
    max_running: int,
    kind: str,
    replay: bool,
) -> None:
    limits = Limits(max_running=max_running, max_waiting=5, step_tokens=64, chunk_tokens=32)
    engine, executor = mirrored_engine(models[kind], pages, replay=replay, limits=limits)
    driver = Driver(engine)
    driver.play(actions)
    check_end(driver)
    executor.check_equal()
    drive(engine, Add(request_of("last", 5, 1)))
    assert len(executor.follower.plans) <= 1, "copies of sequences that ended are dropped"
