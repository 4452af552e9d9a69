"""Lookahead: a decode step is launched before the previous one is read."""

from dataclasses import replace

import pytest
import torch

from runtime.core.sequence import SequenceGroup
from runtime.engine import Add, Cancel, Command, Reserve
from runtime.errors import NotFinite
from runtime.models.build import build_model
from runtime.models.model import Model
from tests.runtime.steps.scripts import Watch, compare, engine_of, play, request
from tests.runtime.tiny import request_of, tiny_checkpoint


def test_step_is_read_after_the_next_one_is_launched(model: Model) -> None:
    engine = engine_of(model, 16, 4, replay=True)
    with Watch().over(engine) as watch:
        seen = []
        for commands in ([Add(request(0, 5, 3, 0, 1))], [], [], []):
            tokens = [token.index for _, token in engine.step(commands).tokens]
            seen.append((tokens, watch.launches, engine.has_work))
    # The prompt's step samples one token; no step is launched after that of the last token.
    assert seen == [([], 1, True), ([0], 2, True), ([1], 3, True), ([2], 3, False)]


def test_tokens_of_a_held_prompt_are_reported_without_another_launch(model: Model) -> None:
    engine = engine_of(model, 16, 4, replay=True)
    with Watch().over(engine) as watch:
        launched = engine.step([Add(request(0, 40, 3, 0, 2), hold=True)])
        assert ([chunk.num_tokens for chunk in launched.computed], launched.tokens) == ([32], [])
        assert len(engine.step([]).computed) == 1
        assert engine.has_work
        assert [token.choice for _, token in engine.step([]).tokens] == [0, 1]
        assert watch.launches == 2
        assert not engine.has_work
    assert engine.scheduler.pages.free == (13,), "the prompt's pages are held"


def test_pages_of_a_cancelled_prompt_are_not_free_while_its_chunk_is_in_flight(
    model: Model,
) -> None:
    engine = engine_of(model, 3, 4, replay=True)
    with Watch().over(engine):
        engine.step([Add(request(0, 40, 10, 0, 1))])
        assert engine.step([Cancel("r0"), Reserve(request(2, 40, 2, 0, 1))]).reserved == []
        assert [reserved.id for reserved in engine.step([]).reserved] == ["r2"]


def test_pages_of_an_in_flight_step_are_not_free(model: Model) -> None:
    """A sequence ends while its next step is in flight, and a request waits for its pages."""
    first, second = request(0, 30, 10, 0, 1), request(2, 40, 1, 0, 1)
    whole = play(engine_of(model, 4, 4, replay=False), [[Add(first)]]).output("r0")
    stops = frozenset({whole[4]})
    engine = engine_of(model, 4, 4, replay=True)
    output = engine.step([Add(replace(first, stop_token_ids=stops)), Add(second)])
    while not output.ended:
        output = engine.step([])
    assert engine.scheduler.pages.free == (1,), "the in-flight step still uses three pages"
    assert (engine.step([]).started, engine.scheduler.pages.free) == ([], (4,))
    assert engine.step([]).started == ["r2"]


def test_pages_of_a_cancelled_request_are_not_free_while_its_step_is_in_flight(
    model: Model,
) -> None:
    """Once pages are reserved, another worker may write to them at any time."""
    engine = engine_of(model, 3, 4, replay=True)
    with Watch().over(engine):
        for commands in ([Add(request(0, 30, 10, 0, 1))], [], []):
            engine.step(commands)
        waiting = Reserve(request(2, 40, 2, 0, 1))
        assert engine.step([Cancel("r0"), waiting]).reserved == []
        assert [reserved.id for reserved in engine.step([]).reserved] == ["r2"]


def test_reused_request_id_gets_no_token_of_the_cancelled_request(model: Model) -> None:
    """The step of the first request is still in flight when it is cancelled."""
    old = request(0, 5, 30, 0, 1)
    new = replace(request(2, 20, 30, 0, 1), id="r0")
    expected = play(engine_of(model, 16, 4, replay=False), [[Add(new)]]).tokens
    engine = engine_of(model, 16, 4, replay=True)
    for _ in range(4):
        engine.step([Add(old)] if not engine.has_work else [])
    assert play(engine, [[Cancel("r0"), Add(new)]]).tokens == expected


def test_step_is_read_before_a_sequence_is_preempted(model: Model) -> None:
    script: list[list[Command]] = [[Add(request(2 * n, 14, 40, n % 3, 1)) for n in range(4)]]
    plain = play(engine_of(model, 9, 4, replay=False), script)
    engine = engine_of(model, 9, 4, replay=True)
    requeue = engine.scheduler._requeue
    preempted = []

    def watched(group: SequenceGroup) -> None:
        preempted.append([sequence.lookahead for sequence in group.sequences])
        requeue(group)

    with Watch().over(engine), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "_requeue", watched)
        compare(play(engine, script), plain, set())
    assert preempted
    assert all(lookahead == [0] for lookahead in preempted)


def test_non_finite_logits_end_a_request_whose_next_step_is_in_flight() -> None:
    checkpoint = tiny_checkpoint()
    requests = [request_of(str(n), 9 + n, 12, choices=1 + n % 2, seed=n) for n in range(3)]
    script: list[list[Command]] = [[Add(r) for r in requests]]
    sound = play(engine_of(build_model(checkpoint), 64, 4, replay=False), script)
    others = {t for name in "02" for t in sound.output(name)} | {
        t for r in requests for t in r.tokens
    }
    index = next(i for i, token in enumerate(sound.output("1")) if i > 2 and token not in others)
    embedding = checkpoint.embedding.clone()
    embedding[sound.output("1")[index]] = torch.nan
    engine = engine_of(build_model(replace(checkpoint, embedding=embedding)), 64, 4, replay=True)
    with Watch().over(engine):
        found = play(engine, script)
    assert {name: type(fault) for name, fault in found.refused.items()} == {"1": NotFinite}
    assert [found.output("1", choice) for choice in range(2)] == [
        sound.output("1")[: index + 1]
    ] * 2
    assert all(found.output(name) == sound.output(name) for name in "02")
