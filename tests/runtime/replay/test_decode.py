"""An engine that replays its decode steps, and reads each while the next one runs, says what one
says that does not, bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.attention.base import Batch, SequenceSlice
from runtime.core.limits import Limits
from runtime.core.request import MOST_LOGPROBS, Request, SampledToken, SamplingParams
from runtime.core.sequence import Sequence, SequenceGroup
from runtime.engine import Add, Arrived, Cancel, Command, Engine, Release, Reserve
from runtime.errors import NotFinite
from runtime.models.model import Model
from runtime.replay.decode import UNDECIDED, DecodeReplay, Flight
from runtime.replay.slots import Rows
from runtime.sampling.on_device import Needs
from runtime.sampling.reference import Draw
from tests.runtime.tiny import (
    CONFIG,
    Record,
    prompt_of,
    request_of,
    tiny_checkpoint,
    tiny_model,
)

KINDS = [
    SamplingParams(),
    SamplingParams(logprobs=3),
    SamplingParams(temperature=0.8, seed=11),
    SamplingParams(temperature=1.2, top_p=0.9, seed=12, logprobs=0),
    SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.2, seed=13),
    SamplingParams(repetition_penalty=1.2, logit_bias={4: 2.0}),
    SamplingParams(temperature=90.0, seed=14),
    SamplingParams(logprobs=MOST_LOGPROBS),
    SamplingParams(temperature=90.0, top_p=0.99, seed=15, logprobs=2),  # never decided by a few
]
STOPS = frozenset(range(9, 1300, 50))  # so many that some end by them


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(config=replace(CONFIG, num_layers=1, vocab_size=1300))


def engine_of(model: Model, pages: int, running: int, *, replay: bool) -> Engine:
    limits = Limits(max_running=running, max_waiting=64, step_tokens=64, chunk_tokens=32)
    return Engine(model, num_pages=pages, limits=limits, replay=replay)


def fill(engine: Engine, request: Request, pages: list[int]) -> None:
    """The KV of a prompt, as another worker would send it."""
    cache = engine.model.new_cache(len(pages))
    prompt = SequenceSlice(request.tokens, 0, range(len(pages)))
    engine.model.forward(Batch.of([prompt]), cache)
    for target, source in zip(engine.cache.planes, cache.planes, strict=True):
        target[pages] = source


def play(engine: Engine, script: list[list[Command]]) -> Record:
    """Step by step; what was reserved arrives in the next step, what was held is released then."""
    record = Record()
    held = {c.request.id for step in script for c in step if isinstance(c, Add) and c.hold}
    sent = {c.request.id: c.request for step in script for c in step if isinstance(c, Reserve)}
    steps = 0
    arriving: list[Command] = []
    while steps < len(script) or engine.has_work or arriving:
        commands = arriving + (script[steps] if steps < len(script) else [])
        output = engine.step(commands)
        for name, pages in output.reserved:
            fill(engine, sent[name], list(pages))
        arriving = [
            Arrived(name, tuple(SampledToken(choice, 0, 7 + choice) for choice in range(2)))
            for name, _ in output.reserved
        ]
        arriving += [Release(name) for name, _ in output.tokens if name in held]
        record.add(output)
        steps += 1
        assert steps < 3000
    assert engine.pages_free == engine.pages_total
    return record


def compare(found: Record, expected: Record, cancelled: set[str]) -> None:
    """Equal, but for those that were cut off at some step: these say the same as far as they go."""
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
    """Pages that steps in flight, and chunks before them, read and write, as they were when each
    step was launched."""

    flights: list[tuple[Flight, set[int]]] = field(default_factory=list)
    launches: int = 0
    undecided: int = 0

    @contextmanager
    def over(self, engine: Engine) -> Iterator["Watch"]:
        replay, pool = engine._replay, engine._scheduler.pool
        assert replay is not None
        launch, collect, allocate = replay.launch, replay.collect, pool.allocate

        def launched(sequences: list[Sequence]) -> Flight:
            flight = launch(sequences)
            chunks = [s for work in engine._scheduler._prefilling for s in work.sequences]
            pages = {page for sequence in sequences + chunks for page in sequence.pages}
            self.flights.append((flight, pages))
            self.launches += 1
            return flight

        def collected(flight: Flight) -> list[Draw | None]:
            draws = collect(flight)
            assert self.flights.pop(0)[0] is flight, "in the order in which they were launched"
            self.undecided += draws.count(UNDECIDED)
            return draws

        def allocated(count: int) -> list[int]:
            pages = allocate(count)
            for _, busy in self.flights:
                assert busy.isdisjoint(pages), "a page of a step in flight is somebody else's"
            return pages

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replay, "launch", launched)
            patch.setattr(replay, "collect", collected)
            patch.setattr(pool, "allocate", allocated)
            yield self
        assert not self.flights


def request(number: int, length: int, tokens: int, kind: int, choices: int) -> Request:
    prompt = prompt_of(length, number)
    stops = STOPS if number % 2 else frozenset()
    return Request(f"r{number}", prompt, length, KINDS[kind], tokens, stops, choices)


Sent = st.tuples(
    st.sampled_from(["add", "add", "hold", "reserve", "cancel", "wait"]),
    st.integers(1, 40),
    st.integers(1, 30),
    st.integers(0, len(KINDS) - 1),
    st.integers(1, 3),
)


@settings(max_examples=60, deadline=None)
@given(sent=st.lists(Sent, max_size=25), pages=st.integers(4, 16), running=st.integers(1, 9))
def test_both_engines_say_the_same(
    model: Model, sent: list[tuple[str, int, int, int, int]], pages: int, running: int
) -> None:
    """Sequences come and go, are preempted, get pages, and share a bucket with empty rows."""
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


def test_rows_close_up_when_most_have_left(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they leave behind is nobody's."""
    engine = engine_of(model, 64, 9, replay=True)
    requests = [request(n, 5 + n, 60 if n in (3, 8) else 4 + n, 0, 1) for n in range(9)]
    buckets: list[int] = []
    assert engine._replay is not None
    run = engine._replay._run

    def watched(bucket: int, needs: Needs) -> None:
        buckets.append(bucket)
        run(bucket, needs)

    monkeypatch.setattr(engine._replay, "_run", watched)
    found = play(engine, [[Add(r) for r in requests]])
    plain = play(engine_of(model, 64, 9, replay=False), [[Add(r) for r in requests]])
    compare(found, plain, set())
    assert max(buckets) == 9
    assert buckets[-1] <= 2
    assert engine.pages_free == engine.pages_total == 64
    assert len(engine.cache.planes[0]) == 65


def test_warming_up_changes_nothing(model: Model) -> None:
    engine = engine_of(model, 16, 4, replay=True)
    replay = engine._replay
    assert isinstance(replay, DecodeReplay)
    told: list[int] = []
    replay.warm_up(told.append)
    assert told == [4, 2, 1]
    script: list[list[Command]] = [[Add(request(1, 20, 30, 2, 2))]]
    plain = play(engine_of(model, 16, 4, replay=False), script)
    compare(play(engine, script), plain, set())
    assert not replay._rows.positions[1:].any()  # rows that nobody had


def test_a_graph_for_each_layer_draws_the_same(model: Model) -> None:
    records = []
    for by_layer in (False, True):
        engine = Engine(
            model,
            num_pages=40,
            limits=Limits(max_running=4, max_waiting=4),
            replay=True,
            by_layer=by_layer,
        )
        script: list[list[Command]] = [[Add(request(n, 5 + 9 * n, 9, n, 1)) for n in range(3)]]
        records.append(play(engine, script))
    assert records[0].tokens == records[1].tokens
    assert records[0].tokens


def test_a_step_is_read_when_the_next_one_was_launched(model: Model) -> None:
    engine = engine_of(model, 16, 4, replay=True)
    with Watch().over(engine) as watch:
        said = []
        for commands in ([Add(request(0, 5, 3, 0, 1))], [], [], []):
            tokens = [token.index for _, token in engine.step(commands).tokens]
            said.append((tokens, watch.launches, engine.has_work))
    # One is sampled from the prompt, two by steps: the last of them is known to be the last.
    assert said == [([0], 0, True), ([], 1, True), ([1], 2, True), ([2], 2, False)]


def test_pages_of_a_step_in_flight_are_not_free(model: Model) -> None:
    """A sequence ends by a token that nobody could know, and another one waits for its pages."""
    first, second = request(0, 30, 10, 0, 1), request(2, 40, 1, 0, 1)
    whole = play(engine_of(model, 4, 4, replay=False), [[Add(first)]]).output("r0")
    stops = frozenset({whole[4]})
    engine = engine_of(model, 4, 4, replay=True)
    output = engine.step([Add(replace(first, stop_token_ids=stops)), Add(second)])
    while not output.ended:
        output = engine.step([])
    assert engine.pages_free == 1, "one token too many is computed"
    assert (engine.step([]).started, engine.pages_free) == ([], 4)
    assert engine.step([]).started == ["r2"]


def test_pages_of_whom_is_cancelled_are_not_free_either(model: Model) -> None:
    """Another worker would write into them whenever it likes."""
    engine = engine_of(model, 3, 4, replay=True)
    with Watch().over(engine):
        for commands in ([Add(request(0, 30, 10, 0, 1))], [], []):
            engine.step(commands)
        waiting = Reserve(request(2, 40, 2, 0, 1))
        assert engine.step([Cancel("r0"), waiting]).reserved == []
        assert [name for name, _ in engine.step([]).reserved] == ["r2"]


def test_draws_that_need_the_host_are_finished_from_their_own_logits(model: Model) -> None:
    """Flat rows wait for the host at every token, also the last one; others go on beside them."""
    requests = [request(0, 5, 40, 0, 1), request(2, 9, 12, 8, 2), request(4, 7, 25, 5, 1)]
    script: list[list[Command]] = [[Add(r) for r in requests], [], [], [Cancel("r0")]]
    plain = play(engine_of(model, 16, 4, replay=False), script)
    engine = engine_of(model, 16, 4, replay=True)
    with Watch().over(engine) as watch:
        compare(play(engine, script), plain, {"r0"})
    assert watch.undecided > 10


def test_the_host_knows_where_a_row_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vocabulary so large, and a distribution so flat, that most draws need the host. A row
    that the host took for further on would be written anew, or, worse, taken for up to date."""
    flat = tiny_model(config=replace(CONFIG, num_layers=1, vocab_size=20_000))
    joined: list[int] = []
    write = Rows.write

    def counted(self: Rows, sequences: list[Sequence]) -> dict[int, Sequence]:
        rows = write(self, sequences)
        joined.extend(rows)
        return rows

    monkeypatch.setattr(Rows, "write", counted)
    flattest = Request("s", (1, 2, 3), 3, SamplingParams(temperature=90.0, seed=14), max_tokens=40)
    script: list[list[Command]] = [[Add(flattest)]]
    found = play(engine_of(flat, 16, 4, replay=True), script)
    assert joined == [0]
    assert found.tokens == play(engine_of(flat, 16, 4, replay=False), script).tokens


def test_a_request_of_the_same_name_gets_nothing_of_the_one_before(model: Model) -> None:
    """Whose step is still in flight when it is cancelled."""
    old, new = request(0, 5, 30, 0, 1), replace(request(2, 20, 30, 0, 1), id="r0")
    expected = play(engine_of(model, 16, 4, replay=False), [[Add(new)]]).tokens
    engine = engine_of(model, 16, 4, replay=True)
    for _ in range(4):
        engine.step([Add(old)] if not engine.has_work else [])
    assert play(engine, [[Cancel("r0"), Add(new)]]).tokens == expected


def test_a_step_is_read_before_somebody_has_to_give_pages_back(model: Model) -> None:
    script: list[list[Command]] = [[Add(request(2 * n, 14, 40, n % 3, 1)) for n in range(4)]]
    plain = play(engine_of(model, 9, 4, replay=False), script)
    engine = engine_of(model, 9, 4, replay=True)
    requeue, preempted = engine._scheduler._requeue, []

    def watched(work: SequenceGroup) -> None:
        preempted.append([sequence.ahead for sequence in work.sequences])
        requeue(work)

    with Watch().over(engine), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._scheduler, "_requeue", watched)
        compare(play(engine, script), plain, set())
    assert preempted
    assert all(ahead == [0] for ahead in preempted)


def test_logits_that_are_not_finite_end_a_sequence_whose_next_step_is_in_flight() -> None:
    checkpoint = tiny_checkpoint()
    requests = [request_of(str(n), 9 + n, 12, choices=1 + n % 2, seed=n) for n in range(3)]
    script: list[list[Command]] = [[Add(r) for r in requests]]
    sound = play(engine_of(Model(checkpoint), 64, 4, replay=False), script)
    others = {t for name in "02" for t in sound.output(name)} | {
        t for r in requests for t in r.tokens
    }
    index = next(i for i, token in enumerate(sound.output("1")) if i > 2 and token not in others)
    embedding = checkpoint.embedding.clone()
    embedding[sound.output("1")[index]] = torch.nan
    engine = engine_of(Model(replace(checkpoint, embedding=embedding)), 64, 4, replay=True)
    with Watch().over(engine):
        found = play(engine, script)
    assert {name: type(fault) for name, fault in found.refused.items()} == {"1": NotFinite}
    assert [found.output("1", choice) for choice in range(2)] == [
        sound.output("1")[: index + 1]
    ] * 2
    assert all(found.output(name) == sound.output(name) for name in "02")
