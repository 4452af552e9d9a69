"""Calls of an engine to its executor. No tensor is computed."""

from collections.abc import Sequence as Items

from runtime.core.limits import Limits
from runtime.core.plan import StepPlan
from runtime.engine import Add, Engine
from runtime.errors import NotFinite
from runtime.sampling.reference import Draw
from tests.runtime.engine.fake_executor import TOKEN, FakeExecutor, FakeStep
from tests.runtime.tiny import drive, request_of

LIMITS = Limits(max_running=8, max_waiting=8, step_tokens=32, chunk_tokens=32)


class Recorded(FakeExecutor):
    """Records the calls of an engine, in order.

    Args:
        calls: list to append to.
    """

    def __init__(
        self, name: str, calls: list[tuple[object, ...]], pages: int = 64, limits: Limits = LIMITS
    ) -> None:
        super().__init__(pages, limits)
        self.name = name
        self.calls = calls

    def launch(self, plan: StepPlan) -> FakeStep:
        chunks = [(chunk.first, chunk.count) for chunk in plan.chunks]
        self.calls.append((self.name, "launch", chunks, len(plan.decode)))
        return super().launch(plan)

    def copy_pages(self, group: int, sources: Items[int], targets: Items[int]) -> None:
        self.calls.append((self.name, "copy", [*sources], len(set(targets))))


def test_engine_without_a_model_runs_requests_to_their_end() -> None:
    calls: list[tuple[object, ...]] = []
    engine = Engine(Recorded("rank", calls))
    record = drive(engine, Add(request_of("a", 40, 3)))
    assert [token.token for token in record.tokens["a", 0]] == [TOKEN] * 3
    assert calls == [
        ("rank", "launch", [(0, 32)], 0),
        ("rank", "launch", [(32, 8)], 0),
        ("rank", "launch", [], 1),
        ("rank", "launch", [], 1),
    ]
    assert engine.scheduler.pages.free == engine.scheduler.pages.total


def test_choices_copy_the_partly_filled_page_after_the_launch() -> None:
    calls: list[tuple[object, ...]] = []
    engine = Engine(Recorded("rank", calls))
    output = engine.step([Add(request_of("a", 24, 2, choices=3))])
    last = output.computed[0].page_tables[0][-1]
    assert calls == [("rank", "launch", [(0, 24)], 0), ("rank", "copy", [last] * 2, 2)]


def test_lookahead_of_the_executor_delays_tokens_by_one_step() -> None:
    engine = Engine(FakeExecutor(64, LIMITS, lookahead=True))
    assert not engine.step([Add(request_of("a", 8, 2))]).tokens
    assert len(engine.step([]).tokens) == 1


def test_step_without_finite_logits_refuses_the_request() -> None:
    class Damaged(FakeExecutor):
        def launch(self, plan: StepPlan) -> FakeStep:
            return DamagedStep(super().launch(plan).sampled)

    class DamagedStep(FakeStep):
        def read(self) -> list[Draw | None]:
            return [None] * self.sampled

    engine = Engine(Damaged(64, LIMITS))
    output = engine.step([Add(request_of("a", 8, 2))])
    [(name, fault)] = output.refused
    assert name == "a"
    assert isinstance(fault, NotFinite)
    assert engine.scheduler.pages.free == engine.scheduler.pages.total


def test_preempted_sequence_is_launched_again_from_its_start() -> None:
    calls: list[tuple[object, ...]] = []
    engine = Engine(Recorded("rank", calls, pages=4))
    record = drive(engine, Add(request_of("a", 20, 30)), Add(request_of("b", 20, 30)))
    assert [len(record.tokens[name, 0]) for name in "ab"] == [30, 30]
    prompts = [call[2] for call in calls if call[1] == "launch" and call[2]]
    assert len(prompts) > 2, "one of the sequences was preempted"
