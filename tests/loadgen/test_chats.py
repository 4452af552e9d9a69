"""Turns of chats follow the answers, in open and in closed loops."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from loadgen.clock import Clock
from loadgen.closed_loop import ClosedLoop
from loadgen.early_end import EarlyEnd
from loadgen.lookahead import Lookahead
from loadgen.measures import TTFT, Objective, Window
from loadgen.record import Failure, Record
from loadgen.runner import Runner
from loadgen.schedule import ScheduledRequest
from loadgen.workload.base import Dialogue, Message, RequestSpec, Role, Turn

ANSWER_S = 0.01


def chat_of(turns: int, *, think_s: float = 0.0, due: float = 0.0) -> ScheduledRequest:
    later = tuple(Turn(f"question {n}", 2, 4, think_s) for n in range(2, turns + 1))
    messages = (Message(Role.SYSTEM, "a system"), Message(Role.USER, "question 1"))
    return ScheduledRequest(RequestSpec(Dialogue(messages), 4, 4, later=later), due)


class Target:
    """Target that answers after `ANSWER_S`, or fails where ``fails`` says so."""

    name = "fake"

    def __init__(self, fails: Callable[[Record], bool] = lambda record: False) -> None:
        self._fails = fails
        self.prompts: dict[tuple[int | None, int], str] = {}

    async def send(self, scheduled: ScheduledRequest, record: Record, clock: Clock) -> None:
        prompt = scheduled.spec.prompt
        assert isinstance(prompt, Dialogue)
        self.prompts[record.chat, record.turn] = str(prompt.joined)
        record.sent = clock()
        await asyncio.sleep(ANSWER_S)
        if self._fails(record):
            record.failure, record.detail = Failure.REJECTED, "status 429"
        else:
            record.times, record.counts = [clock()], [4]
            record.text = f" answer {record.turn}."
        record.ended = clock()

    async def close(self) -> None:
        return


async def played(
    chats: Sequence[ScheduledRequest],
    target: Target,
    *,
    end: float = 0.0,
    duration_s: float | None = None,
) -> Runner:
    runner = Runner(chats, target, end=end, duration_s=duration_s, keep_answers=False)
    async with asyncio.timeout(30):
        await runner.run(Clock())
    return runner


async def test_each_turn_has_the_answers_before_it() -> None:
    target = Target()
    runner = await played([chat_of(3), chat_of(1, due=0.005)], target)
    assert target.prompts == {
        (0, 1): "a system question 1",
        (0, 2): "a system question 1 answer 1. question 2",
        (0, 3): "a system question 1 answer 1. question 2 answer 2. question 3",
        (1, 1): "a system question 1",
    }
    assert [(one.chat, one.turn) for one in runner.records] == [(0, 1), (1, 1), (0, 2), (0, 3)]
    assert [one.number for one in runner.records] == [0, 1, 2, 3]
    assert [one.input_tokens for one in runner.records] == [4, 4, 10, 16]
    assert [one.spec.input_tokens for one in runner.schedule] == [4, 4, 10, 16]
    assert not any(one.text for one in runner.records), "answers are not kept"
    assert runner.turns_left == 0


async def test_turn_is_due_at_the_end_of_the_previous_answer_and_the_think_time() -> None:
    runner = await played([chat_of(3, think_s=0.05)], Target())
    for before, after in zip(runner.records, runner.records[1:], strict=False):
        assert before.ended is not None
        assert after.sent is not None
        assert after.due == pytest.approx(before.ended + 0.05)
        assert after.sent >= after.due
    assert runner.load_end == runner.records[-1].due


async def test_turns_after_a_failed_one_are_recorded_as_not_sent() -> None:
    runner = await played(
        [chat_of(4), chat_of(4)], Target(lambda one: (one.chat, one.turn) == (0, 2))
    )
    failed = [one for one in runner.records if one.chat == 0]
    assert [one.failure for one in failed] == [
        *(None, Failure.REJECTED, Failure.NOT_SENT, Failure.NOT_SENT)
    ]
    assert [one.turn for one in failed] == [1, 2, 3, 4]
    for one in failed[2:]:
        assert one.sent is None
        assert one.due == failed[1].ended
        assert "turn 2 of its chat rejected" in one.detail
    assert all(one.succeeded for one in runner.records if one.chat == 1)
    assert len(runner.schedule) == len(runner.records) == 8


async def test_no_turn_is_sent_after_the_duration() -> None:
    runner = await played([chat_of(100)], Target(), duration_s=5.5 * ANSWER_S)
    assert 1 < len(runner.records) <= 6
    assert all(one.due < 5.5 * ANSWER_S for one in runner.records)
    assert all(one.succeeded for one in runner.records)
    assert runner.turns_left == 0


async def test_stopped_run_ends_chats_in_their_think_time() -> None:
    runner = Runner([chat_of(3, think_s=3600.0)], Target())
    running = asyncio.create_task(runner.run(Clock()))
    async with asyncio.timeout(30):
        while runner.records[0].ended is None:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)
        runner.stopped.set()
        await running
    assert len(runner.records) == 1
    assert runner.records[0].text == " answer 1."


async def test_closed_loop_keeps_chats_in_flight() -> None:
    in_flight: list[set[int | None]] = [set()]
    target = Target()

    class Watched(Target):
        async def send(self, scheduled: ScheduledRequest, record: Record, clock: Clock) -> None:
            now = in_flight[-1] | {record.chat}
            in_flight.append(now)
            await target.send(scheduled, record, clock)
            if scheduled.spec.later == ():
                in_flight.append(in_flight[-1] - {record.chat})

    requests = Lookahead(iter([chat_of(3) for _ in range(8)]), 8)
    runner = ClosedLoop(requests, Watched(), 2, None)
    async with asyncio.timeout(30):
        await runner.run(Clock())
    assert max(map(len, in_flight)) == 2
    assert len(runner.records) == 24
    assert {(one.chat, one.turn) for one in runner.records} == {
        (chat, turn) for chat in range(8) for turn in (1, 2, 3)
    }
    assert target.prompts[7, 3].endswith("answer 2. question 3")


async def test_turns_that_may_still_meet_the_objectives_defer_an_early_end() -> None:
    """Half of the first turns are late, but three of four requests are not sent yet."""
    runner = Runner([chat_of(4) for _ in range(4)], Target())
    for record in runner.records:
        record.sent, record.ended = 0.0, 2.0
        record.times = [1.0 if record.number % 2 else 0.1]
    early = EarlyEnd(0.75, Window(0.0, 60.0), [Objective(TTFT, 0.5)])
    assert runner.turns_left == 12
    assert not early.is_out_of_reach(runner.records, 3.0, runner.turns_left)
    assert early.is_out_of_reach(runner.records, 3.0, 0)


async def test_single_requests_belong_to_no_chat() -> None:
    single = replace(chat_of(1).spec, later=None)
    runner = await played([ScheduledRequest(single, 0.0)], Target())
    assert [(one.chat, one.turn) for one in runner.records] == [(None, 1)]
