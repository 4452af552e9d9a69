"""An engine that replays its decode steps says what one says that does not, bit for bit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine import Add, Arrived, Cancel, Command, Engine, Reserve, StepOutput
from runtime.model import Model
from runtime.replay import TOP, DecodeReplay
from runtime.sequence import Request, SampledToken, Sampling
from runtime.static_sampling import EVERYTHING, Needs
from runtime.work import Limits
from tests.runtime.tiny import CONFIG, prompt_of, tiny_model

KINDS = [
    Sampling(),
    Sampling(logprobs=3),
    Sampling(temperature=0.8, seed=11),
    Sampling(temperature=1.2, top_p=0.9, seed=12, logprobs=0),
    Sampling(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.2, seed=13),
    Sampling(repetition_penalty=1.2, logit_bias={4: 2.0}),
    Sampling(temperature=90.0, seed=14),
    Sampling(logprobs=TOP + 5),  # more than a replay finds
]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(config=replace(CONFIG, num_layers=1, vocab_size=1300))


def engine_of(model: Model, pages: int, running: int, *, replay: bool) -> Engine:
    limits = Limits(max_running=running, max_waiting=64, step_tokens=64, chunk_tokens=32)
    return Engine(model, num_pages=pages, limits=limits, replay=replay)


def said(output: StepOutput) -> StepOutput:
    """With faults as text, which can be compared."""
    return replace(output, refused=[(name, repr(fault)) for name, fault in output.refused])  # type: ignore[misc]


def play(engine: Engine, script: list[list[Command]]) -> list[StepOutput]:
    """Step by step; what was reserved arrives in the next step."""
    outputs: list[StepOutput] = []
    steps = 0
    arriving: list[Command] = []
    while steps < len(script) or engine.has_work or arriving:
        commands = arriving + (script[steps] if steps < len(script) else [])
        output = engine.step(commands)
        arriving = [
            Arrived(name, tuple(SampledToken(choice, 0, 7 + choice) for choice in range(2)))
            for name, _ in output.reserved
        ]
        outputs.append(said(output))
        steps += 1
        assert steps < 3000
    return outputs


def request(number: int, length: int, tokens: int, kind: int, choices: int) -> Request:
    prompt = prompt_of(length, number)
    return Request(f"r{number}", prompt, length, KINDS[kind], tokens, frozenset({9}), choices)


Sent = st.tuples(
    st.sampled_from(["add", "add", "reserve", "cancel", "wait"]),
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
    for number, (action, length, tokens, kind, choices) in enumerate(sent):
        match action:
            case "add":
                script.append([Add(request(number, length, tokens, kind, choices))])
            case "reserve":
                script.append([Reserve(request(number, length, tokens + 1, kind, 2))])
            case "cancel":
                script.append([Cancel(f"r{length % (number + 1)}")])
            case _:
                script.append([])
    plain, replayed = (
        play(engine_of(model, pages, running, replay=replay), script) for replay in (False, True)
    )
    assert replayed == plain


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
    assert found == play(engine_of(model, 64, 9, replay=False), [[Add(r) for r in requests]])
    assert max(buckets) == 9
    assert buckets[-1] <= 2
    assert engine.pages_free == engine.pages_total == 64
    assert len(engine.cache.planes[0]) == 65


def test_warming_up_changes_nothing(model: Model) -> None:
    engine = engine_of(model, 16, 4, replay=True)
    replay = engine._replay
    assert isinstance(replay, DecodeReplay)
    told: list[int] = []
    kinds = [Needs(draws=False, shapes=False, logprobs=False), EVERYTHING]
    replay.warm_up(kinds, told.append)
    assert told == [4, 2, 1]
    script: list[list[Command]] = [[Add(request(1, 20, 30, 2, 2))]]
    assert play(engine, script) == play(engine_of(model, 16, 4, replay=False), script)
    assert not replay._positions[1:].any()  # rows that nobody had
