"""Plans that a second rank decodes equal those of the engine, and give the same tokens and KV."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.plan import Chunk, StepPlan
from runtime.core.sequence import Purpose, SequenceGroup, SequenceState
from runtime.engine import Add, Command, Engine
from runtime.engine.pages import SequencePages
from runtime.engine.plan_deltas import PlanDecoder, PlanEncoder
from runtime.engine.plan_fields import WordReader
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.plan import PageCount, PagePlan
from tests.runtime.engine import test_sequence_owner
from tests.runtime.engine.mirrored import Mirrored, what_executors_read
from tests.runtime.engine.test_engine_random import ACTIONS, Driver, check_end
from tests.runtime.steps.scripts import SAMPLINGS
from tests.runtime.tiny import CONFIG, drive, request_of, tiny_checkpoint

PLAN = PagePlan(16)
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


class Sent:
    """An encoder and a decoder of the plans of one engine."""

    def __init__(self) -> None:
        self.encoder = PlanEncoder(PLAN)
        self.decoder = PlanDecoder()

    def check(
        self,
        *,
        decode: Sequence[SequenceState] = (),
        chunks: Sequence[Chunk] = (),
        prefilling: Sequence[SequenceGroup] = (),
    ) -> int:
        """Check that a plan is decoded as it was. Return the number of its words."""
        arrivals = frozenset(group.arrival for group in prefilling)
        plan = StepPlan([*chunks], [*decode], [], [], [], arrivals)
        words = self.encoder.encode(plan)
        decoded = self.decoder.decode(WordReader(words))
        assert what_executors_read(decoded) == what_executors_read(plan)
        return len(words)


def admitted(
    pages: SequencePages, arrival: int, tokens: int, *, choices: int = 1, evicts: int = 0
) -> SequenceGroup:
    """Return a group that has pages for its prompt."""
    request = request_of(str(arrival), tokens, choices=choices)
    group = SequenceGroup.of(request, Purpose.GENERATE, arrival, limit=400, evicts=evicts)
    pages.admit(group)
    return group


def running(pages: SequencePages, arrival: int, tokens: int) -> SequenceState:
    """Return a sequence whose prompt is complete."""
    group = admitted(pages, arrival, tokens)
    pages.set_computed(group, tokens)
    [sequence] = group.sequences
    sequence.tokens.append(7)
    return sequence


def test_sequence_that_got_as_many_other_pages_is_sent_with_them() -> None:
    """It was preempted and admitted again before the next plan."""
    sent, pages = Sent(), SequencePages(PLAN, PageCount(40))
    sequence = running(pages, 0, 40)
    sent.check(decode=[sequence])
    [before] = sequence.page_tables
    pages.release([sequence])
    pages.pools[0].allocate(35)
    pages.admit(SequenceGroup(Purpose.GENERATE, [sequence]))
    sequence.tokens.append(8)
    [after] = sequence.page_tables
    assert after != before
    assert len(after) == len(before)
    sent.check(decode=[sequence])


def test_sequence_that_lost_evicted_pages_and_got_as_many_is_sent_with_its_tables() -> None:
    sent, pages = Sent(), SequencePages(PLAN, PageCount(40))
    group = admitted(pages, 0, 150, choices=2, evicts=16)
    chunk = Chunk(group, 128, 22, vacated=range(4, 5))
    sent.check(chunks=[chunk], prefilling=[group])
    pages.set_computed(group, chunk.end, chunk.vacated)
    for sequence in group.sequences:
        sequence.tokens.append(7)
        pages.grow(sequence, PageCount(1))
    sent.check(decode=group.sequences)


def test_prompt_that_waits_for_its_next_chunk_is_not_sent_again() -> None:
    sent, pages = Sent(), SequencePages(PLAN, PageCount(40))
    group = admitted(pages, 0, 200, choices=2)
    sent.check(chunks=[Chunk(group, 0, 32)], prefilling=[group])
    for _ in range(2):
        sent.check(prefilling=[group])
    assert sent.check(chunks=[Chunk(group, 32, 32)], prefilling=[group]) < 50
    assert sent.check(chunks=[Chunk(group, 64, 32)]) < 50, "other ranks still have it"
    sent.check()
    assert len(sent.decoder) == 0


def test_sequence_that_returns_is_sent_again() -> None:
    sent, pages = Sent(), SequencePages(PLAN, PageCount(40))
    first, second = running(pages, 0, 40), running(pages, 1, 20)
    for batch in ([first, second], [second], [first, second], []):
        sent.check(decode=batch)
        assert len(sent.decoder) == len(batch)
        first.tokens.append(8)
        second.tokens.append(9)


def test_sequences_that_gain_a_token_take_two_words_each() -> None:
    sent, pages = Sent(), SequencePages(PLAN, PageCount(200))
    sequences = [running(pages, arrival, 20) for arrival in range(100)]
    sizes = []
    for _ in range(3):
        sizes.append(sent.check(decode=sequences))
        for sequence in sequences:
            sequence.tokens.append(8)
    assert sizes[1] == sizes[2] < 2 * len(sequences) + 10


@pytest.mark.slow
@pytest.mark.few(2)
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
