"""Random commands with a small page pool: no page leaks, no output repeats, every request ends.

All tests run an engine without replay and one with replay, which reads decode steps one step later.
"""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import Request, SampledToken, SamplingParams
from runtime.engine import (
    Add,
    Arrived,
    Cancel,
    CancelChoice,
    Command,
    Engine,
    LocalExecutor,
    Reserve,
    StepOutput,
)
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from tests.runtime.tiny import CONFIG, Record, prompt_of, tiny_model

pytestmark = pytest.mark.slow

ACTIONS = ("add", "hold", "reserve", "cancel", "choice", "step", "step", "step")


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(config=replace(CONFIG, num_layers=1))


@dataclass
class Driver:
    """Sends commands to an engine, as the services do, and checks the output of every step.

    Attributes:
        alive: command kind and request, by id, of requests that have not ended.
        arriving: ids of requests whose KV arrives in the next step.
        gone: ids that ended, were cancelled, or were released.
        cut: ids of requests of which a choice was cancelled.
        pending: commands for the next step.
    """

    engine: Engine
    record: Record = field(default_factory=Record)
    alive: dict[str, tuple[str, Request]] = field(default_factory=dict)
    arriving: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    pending: list[Command] = field(default_factory=list)

    def send(self, kind: str, length: int, max_tokens: int, choices: int) -> None:
        name = f"{kind}-{len(self.alive) + len(self.gone)}"
        sampling = SamplingParams(temperature=0.7 * (length % 2), seed=length)
        request = Request(
            name, prompt_of(length), length, sampling, max_tokens, frozenset({5, 9}), choices
        )
        self.alive[name] = (kind, request)
        command = Reserve(request) if kind == "reserve" else Add(request, hold=kind == "hold")
        self.pending.append(command)

    def leave(self, name: str) -> None:
        del self.alive[name]
        self.gone.add(name)
        self.pending.append(Cancel(name))

    def cancel_choice(self, name: str, choice: int) -> None:
        kind, _ = self.alive[name]
        if kind != "hold":  # a held prompt is not decoded
            self.cut.add(name)
            self.pending.append(CancelChoice(name, choice))

    def step(self) -> None:
        for name in self.arriving:
            if name in self.alive:
                _, request = self.alive[name]
                index = len(request.tokens) - request.prompt_tokens
                first = tuple(SampledToken(c, index, 11 + c) for c in range(request.choices))
                self.pending.append(Arrived(name, first))
        self.arriving.clear()
        commands, self.pending = self.pending, []
        output = self.engine.step(commands)
        self.record.add(output)
        self.check(output)

    def check(self, output: StepOutput) -> None:
        engine = self.engine
        assert engine.scheduler.pages.free.fits(engine.scheduler.pages.total)
        reported = {name for name, _ in output.tokens} | {chunk.id for chunk in output.computed}
        assert not reported & self.gone, "no output for cancelled requests"
        self.arriving += [reserved.id for reserved in output.reserved]
        ended = [*output.ended, *(name for name, _ in output.refused)]
        for name in ended:
            if name in self.gone:  # cancelled in the step in which it was refused or ended
                assert name in self.record.refused or name in self.cut
                continue
            kind, _ = self.alive[name]
            if kind != "hold" or name in self.record.refused:
                del self.alive[name]
                self.gone.add(name)

    def play(self, actions: list[tuple[str, int, int, int]]) -> None:
        """Execute actions with a length, a number of tokens and a number of choices, and finish."""
        for action, length, max_tokens, choices in actions:
            if action == "step":
                self.step()
            elif action in ("cancel", "choice"):
                if self.alive:
                    name = sorted(self.alive)[length % len(self.alive)]
                    if action == "cancel":
                        self.leave(name)
                    else:
                        self.cancel_choice(name, choices - 1)
            else:
                self.send(action, length, max_tokens, choices)
        self.finish()

    def finish(self) -> None:
        """Step until the engine is idle, and release held requests."""
        steps = 0
        self.release_held()
        while self.pending or self.arriving or self.engine.has_work:
            self.step()
            steps += 1
            assert steps < 3000
            self.release_held()

    def release_held(self) -> None:
        for name, (kind, request) in list(self.alive.items()):
            outputs = [self.record.output(name, c) for c in range(request.choices)]
            if kind == "hold" and all(outputs):
                self.leave(name)


def engines(model: Model, pages: int, **limits: int) -> list[Engine]:
    """Return an engine without replay and one with replay."""
    bounds = Limits(step_tokens=64, chunk_tokens=32, **limits)
    return [
        Engine(LocalExecutor(model, EngineOptions(PageCount(pages), bounds, replay=replay)))
        for replay in (False, True)
    ]


@settings(max_examples=150)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(ACTIONS), st.integers(1, 70), st.integers(1, 40), st.integers(1, 3)
        ),
        max_size=40,
    ),
    pages=st.integers(3, 14),
    max_running=st.integers(1, 6),
    max_waiting=st.integers(1, 5),
)
def test_all_pages_return_and_every_request_ends_once(
    model: Model,
    actions: list[tuple[str, int, int, int]],
    pages: int,
    max_running: int,
    max_waiting: int,
) -> None:
    limits = {"max_running": max_running, "max_waiting": max_waiting}
    drivers = [Driver(engine) for engine in engines(model, pages, **limits)]
    for driver in drivers:
        driver.play(actions)
        check_end(driver)


def check_end(driver: Driver) -> None:
    engine = driver.engine
    assert not driver.alive, "every request ended"
    assert engine.scheduler.pages.free == engine.scheduler.pages.total
    assert (
        engine.scheduler.num_running,
        engine.scheduler.num_waiting,
        engine.scheduler.queue_tokens,
    ) == (0, 0, 0)
    for (name, choice), tokens in driver.record.tokens.items():
        if name.startswith("add"):
            assert [token.index for token in tokens] == list(range(len(tokens)))
        if (name, choice) in driver.record.finished and not name.startswith("hold"):
            assert tokens[-1].token in {5, 9} or len(tokens) <= 40


def test_same_commands_give_same_outputs(model: Model) -> None:
    def play(engine: Engine) -> list[StepOutput]:
        driver = Driver(engine)
        for number in range(24):
            driver.send(("add", "hold", "reserve")[number % 3], 7 + 5 * number % 61, 20, 2)
            driver.step()
        driver.finish()
        return driver.record.steps

    limits = {"max_running": 4, "max_waiting": 64}
    for pair in zip(engines(model, 9, **limits), engines(model, 9, **limits), strict=True):
        first, second = (play(engine) for engine in pair)
        assert [str(output) for output in first] == [str(output) for output in second]
