"""Calls of the first rank to followers: their order, their checks and the ends of processes."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from runtime.core.limits import Limits
from runtime.core.plan import StepPlan
from runtime.engine import Add, Engine, Ranks, StepChannel, StepReader, follow
from runtime.engine.channel import BEAT_S, Call, Follower
from runtime.engine.ring import RingSize
from runtime.engine.shared import Words
from runtime.errors import FirstRankEnded, RanksDisagree, RankTimeout
from runtime.sampling.reference import Draw
from runtime.steps.warm_up import Progress
from tests.runtime.engine.fake_executor import TOKEN, FakeExecutor, FakeStep
from tests.runtime.tiny import drive, request_of

LIMITS = Limits(max_running=8, max_waiting=8, step_tokens=32, chunk_tokens=32)
WAIT_S = 60.0
Calls = list[tuple[object, ...]]


class Recorded(FakeExecutor):
    """Records its calls.

    Args:
        calls: list to append to, which ranks may share.
    """

    def __init__(self, name: str, calls: Calls, *, token: int = TOKEN, pages: int = 64) -> None:
        super().__init__(pages, LIMITS)
        self.name = name
        self.calls = calls
        self.token = token

    def warm_up(self, progress: Progress) -> None:
        self.calls.append((self.name, "warm up"))

    def launch(self, plan: StepPlan) -> FakeStep:
        chunks = [(chunk.first, chunk.count) for chunk in plan.chunks]
        self.calls.append((self.name, "launch", chunks, len(plan.decode)))
        return RecordedStep(self, len(plan.sampled))

    def copy_pages(self, group: int, sources: Items[int], targets: Items[int]) -> None:
        self.calls.append((self.name, "copy", group, [*sources], [*targets]))

    def record_event(self) -> int:
        self.calls.append((self.name, "event"))
        return 7


class RecordedStep(FakeStep):
    rank: Recorded

    def __new__(cls, rank: Recorded, sampled: int) -> "RecordedStep":
        step = super().__new__(cls, sampled)
        step.rank = rank
        return step

    def read(self) -> list[Draw | None]:
        self.rank.calls.append((self.rank.name, "read", self.sampled))
        return [Draw(self.rank.token)] * self.sampled


class Sends(StepChannel):
    """Records the messages that are sent."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(1, timeout_s=0)
        self.calls = calls

    def _send(self, call: Call, words: list[int] | Words, timeout_s: float | None = None) -> int:
        self.calls.append(("channel", call))
        return super()._send(call, words, timeout_s)


def run(engine: Engine) -> None:
    engine.warm_up()
    record = drive(engine, Add(request_of("a", 40, 3, choices=2)))
    assert {token.token for token in record.tokens["a", 1]} == {TOKEN}
    engine.executor.record_event()


def execute_all(channel: StepChannel, follower: Follower) -> None:
    [reader] = channel.readers
    while follower.executed < channel.sent:
        message = reader.messages.read()
        assert message is not None
        follower.execute(message)


def test_follower_repeats_all_calls_in_order() -> None:
    calls: dict[str, Calls] = {"first": [], "second": []}
    channel = StepChannel(1, timeout_s=0)
    run(Engine(Ranks(Recorded("rank", calls["first"]), channel)))
    channel.close()
    follow(Recorded("rank", calls["second"]), channel.readers[0])
    assert calls["second"] == calls["first"]
    assert {call[1] for call in calls["first"]} == {"warm up", "launch", "read", "copy", "event"}
    assert [rank.executed for rank in channel.ranks()] == [channel.sent]


def test_first_rank_sends_launches_and_reads_before_it_executes_them() -> None:
    """Both may block until all ranks have executed them."""
    calls: Calls = []
    run(Engine(Ranks(Recorded("first", calls), Sends(calls))))
    for number, call in enumerate(calls):
        match call:
            case ("first", "warm up"):
                assert calls[number - 1] == ("channel", Call.WARM_UP)
            case ("first", "launch", *_):
                assert calls[number - 1] == ("channel", Call.LAUNCH)
            case ("first", "read", *_):
                assert calls[number - 1] == ("channel", Call.READ)
                assert calls[number + 1] == ("channel", Call.TOKENS)


def test_follower_with_another_token_ends() -> None:
    channel = StepChannel(1, timeout_s=0)
    run(Engine(Ranks(Recorded("first", []), channel)))
    with pytest.raises(RanksDisagree, match=r"tokens of step 5: \[1, 1\] .* \[2, 2\] on this"):
        execute_all(channel, Follower(Recorded("second", [], token=TOKEN + 1)))


def test_follower_with_other_pages_ends() -> None:
    channel = StepChannel(1, timeout_s=0)
    Ranks(Recorded("first", []), channel)
    with pytest.raises(RanksDisagree, match="sizes"):
        execute_all(channel, Follower(Recorded("second", [], pages=63)))


def test_close_does_not_wait_for_a_follower_that_is_a_ring_behind() -> None:
    channel = StepChannel(1, timeout_s=WAIT_S, size=RingSize(records=2, words=8))
    Ranks(FakeExecutor(64, LIMITS), channel)
    channel.record_event(0)
    channel.close()
    with pytest.raises(FirstRankEnded):
        follow(FakeExecutor(64, LIMITS), channel.readers[0])


def test_follower_that_misses_a_message_ends() -> None:
    channel = StepChannel(1, timeout_s=0)
    run(Engine(Ranks(Recorded("first", []), channel)))
    [reader] = channel.readers
    reader.messages.read()
    message = reader.messages.read()
    assert message is not None
    with pytest.raises(RanksDisagree, match="message: 1 on the first rank, 0 on this one"):
        Follower(Recorded("second", [])).execute(message)


class Stuck(FakeExecutor):
    """Blocks in every launch."""

    def launch(self, plan: StepPlan) -> FakeStep:
        time.sleep(WAIT_S)
        raise AssertionError("the test did not end this process")


def run_follower(reader: StepReader, executor: type[FakeExecutor]) -> None:
    with reader.beating():
        follow(executor(64, LIMITS), reader)


def run_first_rank(channel: StepChannel) -> None:
    """Run a request to its end, then wait for the next."""
    drive(Engine(Ranks(FakeExecutor(64, LIMITS), channel)), Add(request_of("a", 40, 3)))
    time.sleep(WAIT_S)


@contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[SpawnProcess]:
    """Run a function in another process, which is killed at the end if it still runs."""
    context = multiprocessing.get_context("spawn")
    started = context.Process(target=target, args=arguments)
    started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join()


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.slow
def test_follower_in_another_process_executes_all_messages_and_ends() -> None:
    channel = StepChannel(1, timeout_s=WAIT_S, size=RingSize(records=4, words=8))
    with process(run_follower, channel.readers[0], FakeExecutor) as follower:
        engine = Engine(Ranks(FakeExecutor(64, LIMITS), channel))
        drive(engine, *(Add(request_of(name, 40, 30, choices=2)) for name in "abc"))
        until(lambda: channel.ranks()[0].executed == channel.sent)  # `close` does not wait
        channel.close()
        follower.join(WAIT_S)
        assert follower.exitcode == 0
        [rank] = channel.ranks()
        assert (rank.rank, rank.executed, rank.busy_s) == (1, channel.sent, 0.0)


@pytest.mark.slow
def test_followers_of_a_killed_first_rank_end() -> None:
    channel = StepChannel(1, timeout_s=WAIT_S)
    with process(run_first_rank, channel) as first:
        channel._ring.close()  # only the other process can send now
        ended: list[FirstRankEnded] = []

        def run() -> None:
            with pytest.raises(FirstRankEnded) as raised:
                follow(FakeExecutor(64, LIMITS), channel.readers[0])
            ended.append(raised.value)

        thread = threading.Thread(target=run)
        thread.start()
        # Sizes, two chunks, two further tokens, each step with its read and its tokens.
        until(lambda: channel.ranks()[0].executed == 13)
        first.kill()
        thread.join(WAIT_S)
        assert "after 13 messages" in str(ended[0])


def test_follower_is_busy_until_its_launches_are_read() -> None:
    """A device may hang in a collective after the launch has returned, on any rank."""
    channel = StepChannel(1, timeout_s=0)
    [reader] = channel.readers
    first, second = (FakeExecutor(64, LIMITS, lookahead=True) for _ in range(2))
    thread = threading.Thread(target=follow, args=(second, reader))
    thread.start()
    engine = Engine(Ranks(first, channel))
    engine.step([Add(request_of("a", 40, 3))])
    until(lambda: channel.ranks()[0].executed == channel.sent)
    busy_s = channel.ranks()[0].busy_s
    assert busy_s > 0
    until(lambda: channel.ranks()[0].busy_s > busy_s)
    drive(engine)
    until(lambda: channel.ranks()[0].executed == channel.sent)
    assert channel.ranks()[0].busy_s == 0
    channel.close()
    thread.join()


@pytest.mark.slow
def test_progress_shows_a_stuck_and_a_stopped_follower_and_the_timeout_names_it() -> None:
    channel = StepChannel(1, timeout_s=0.1, size=RingSize(records=64, words=16))
    with process(run_follower, channel.readers[0], Stuck) as follower:
        engine = Engine(Ranks(FakeExecutor(64, LIMITS), channel))
        engine.step([Add(request_of("a", 40, 100))])
        until(lambda: channel.ranks()[0].busy_s > 3 * BEAT_S)
        assert channel.ranks()[0].executed == 1
        assert follower.pid is not None
        os.kill(follower.pid, signal.SIGSTOP)
        until(lambda: channel.ranks()[0].silent_s > 5 * BEAT_S)
        os.kill(follower.pid, signal.SIGCONT)
        until(lambda: channel.ranks()[0].silent_s < 5 * BEAT_S)
        follower.kill()
        follower.join()
        with pytest.raises(RankTimeout, match="rank 1"):
            drive(engine)
        channel.close()


def open_files() -> dict[str, str]:
    """Return what the file descriptors of this process refer to, by number."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder itself
            found[path.name] = str(path.readlink())
    return found


def test_shared_objects_have_no_name_that_killed_processes_could_leave() -> None:
    before = open_files()
    channel = StepChannel(3, timeout_s=0)
    opened = {name for number, name in open_files().items() if number not in before}
    kinds = ("/memfd:headrace (deleted)", "anon_inode:[eventfd]", "pipe:[")
    assert [name for name in opened if not name.startswith(kinds)] == []
    assert len(opened) == len(kinds)  # both ends of a pipe have one name
    del channel
    assert open_files().keys() <= before.keys()
