"""Replayed decode steps produce the same tokens, bit for bit, as steps without replay."""

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import SequenceState
from runtime.engine import Add, Cancel, Command, Engine, LocalExecutor, Reserve
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from runtime.steps.slots import BatchSlots
from tests.runtime.steps.scripts import (
    SAMPLINGS,
    Watch,
    compare,
    engine_of,
    play,
    replay_of,
    request,
)
from tests.runtime.tiny import (
    CONFIG,
    executor_of,
    tiny_model,
)

Sent = st.tuples(
    st.sampled_from(["add", "add", "hold", "reserve", "cancel", "wait"]),
    st.integers(1, 40),
    st.integers(1, 30),
    st.integers(0, len(SAMPLINGS) - 1),
    st.integers(1, 3),
)


@pytest.mark.long
@settings(max_examples=60)
@given(sent=st.lists(Sent, max_size=25), pages=st.integers(4, 16), running=st.integers(1, 9))
def test_replay_output_equals_output_without_replay(
    model: Model, sent: list[tuple[str, int, int, int, int]], pages: int, running: int
) -> None:
    """In random scripts, sequences join, leave, grow and are preempted."""
    script: list[list[Command]] = []
    cancelled = set()
    for number, (action, length, tokens, kind, choices) in enumerate(sent):
        match action:
            case "add":
                script.append([Add(request(number, length, tokens, kind, choices))])
            case "hold":
                script.append([Add(request(number, length, tokens, kind, choices), hold=True)])
            case "reserve":
                script.append([Reserve(request(number, length, tokens + 1, kind, 2))])
            case "cancel":
                cancelled.add(f"r{length % (number + 1)}")
                script.append([Cancel(f"r{length % (number + 1)}")])
            case _:
                script.append([])
    plain = play(engine_of(model, pages, running, replay=False), script)
    engine = engine_of(model, pages, running, replay=True)
    with Watch().over(engine):
        compare(play(engine, script), plain, cancelled)


def test_slots_move_to_a_smaller_bucket_when_sequences_leave(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, 64, 9, replay=True)
    requests = [request(n, 5 + n, 60 if n in (3, 8) else 4 + n, 0, 1) for n in range(9)]
    buckets: list[int] = []
    decode = replay_of(engine)._decode
    run = decode.run

    def watched(bucket: int) -> None:
        buckets.append(bucket)
        run(bucket)

    monkeypatch.setattr(decode, "run", watched)
    found = play(engine, [[Add(r) for r in requests]])
    plain = play(engine_of(model, 64, 9, replay=False), [[Add(r) for r in requests]])
    compare(found, plain, set())
    assert max(buckets) == 9
    assert buckets[-1] <= 2
    assert engine.scheduler.pages.free == engine.scheduler.pages.total == (64,)
    assert len(executor_of(engine).cache.planes[0]) == 65


def test_warm_up_does_not_change_output(model: Model) -> None:
    engine = engine_of(model, 16, 4, replay=True)
    replay = replay_of(engine)
    progress: list[tuple[str, int]] = []
    replay.warm_up(lambda stage, size: progress.append((stage, size)))
    assert progress == [
        *(("prompts", size) for size in (64, 32, 16)),
        *(("decode", size) for size in (4, 2, 1)),
    ]
    script: list[list[Command]] = [[Add(request(1, 20, 30, 2, 2))]]
    plain = play(engine_of(model, 16, 4, replay=False), script)
    compare(play(engine, script), plain, set())
    assert not replay._slots.positions[1:].any(), "unassigned slots stay at position 0"


def test_one_graph_per_layer_produces_the_same_tokens(model: Model) -> None:
    records = []
    for by_layer in (False, True):
        options = EngineOptions(PageCount(40), Limits(4, 4), replay=True, by_layer=by_layer)
        engine = Engine(LocalExecutor(model, options))
        script: list[list[Command]] = [[Add(request(n, 5 + 9 * n, 9, n, 1)) for n in range(3)]]
        records.append(play(engine, script))
    assert records[0].tokens == records[1].tokens
    assert records[0].tokens


def test_host_resolves_draws_from_their_own_logits(model: Model) -> None:
    """The host draws the tokens of one flat distribution while other sequences continue."""
    requests = [request(0, 5, 40, 0, 1), request(2, 9, 12, 8, 2), request(4, 7, 25, 5, 1)]
    script: list[list[Command]] = [[Add(r) for r in requests], [], [], [Cancel("r0")]]
    plain = play(engine_of(model, 16, 4, replay=False), script)
    engine = engine_of(model, 16, 4, replay=True)
    with Watch().over(engine) as watch:
        compare(play(engine, script), plain, {"r0"})
    assert watch.unresolved > 10


def test_slot_that_did_not_advance_is_not_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large vocabulary and a flat distribution leave most draws to the host.

    If the host counted a token that was not drawn, it would rewrite the slot unnecessarily.
    """
    flat = tiny_model(config=replace(CONFIG, num_layers=1, vocab_size=20_000))
    joined: list[int] = []
    update = BatchSlots.update

    def counted(
        self: BatchSlots,
        sequences: list[SequenceState],
        *,
        rewritten: Collection[SequenceState] = (),
    ) -> dict[int, SequenceState]:
        slots = update(self, sequences, rewritten=rewritten)
        joined.extend(slots)
        return slots

    monkeypatch.setattr(BatchSlots, "update", counted)
    flattest = Request("s", (1, 2, 3), 3, SamplingParams(temperature=90.0, seed=14), max_tokens=40)
    script: list[list[Command]] = [[Add(flattest)]]
    found = play(engine_of(flat, 16, 4, replay=True), script)
    assert joined == [0]
    assert found.tokens == play(engine_of(flat, 16, 4, replay=False), script).tokens
