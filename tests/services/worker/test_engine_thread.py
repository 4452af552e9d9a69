"""The engine thread: order of outputs, faults and shutdown."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from runtime.attention.base import Batch
from runtime.engine import Add, Cancel, Engine, Reserve, StepOutput
from runtime.kv.cache import PagedCache
from services.common.placement import StepPace
from services.worker import engine_thread, stall
from services.worker.engine_thread import EngineThread
from tests.runtime.tiny import (
    engine_of,
    executor_of,
    request_of,
    tiny_model,
)

LIMIT_S = 20.0  # seconds, for operations that take milliseconds


class Gate:
    """Blocks the forward passes of an engine until it is opened."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        forward = executor_of(engine).model.forward

        def gated(batch: Batch, cache: PagedCache) -> torch.Tensor:
            assert self.open.wait(LIMIT_S)
            return forward(batch, cache)

        monkeypatch.setattr(executor_of(engine).model, "forward", gated)


class Outputs:
    """All output and faults of a thread, in order."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[StepOutput] = asyncio.Queue()

    async def next(self) -> StepOutput:
        return await asyncio.wait_for(self.queue.get(), LIMIT_S)


async def pace_when_idle(thread: EngineThread) -> StepPace:
    """Return the pace of a thread once it is idle.

    Before, the time since its last step counts as a step if it is longer than the mean.
    """
    while (pace := thread.pace) is None or not pace.idle_s:  # noqa: ASYNC110 - of another thread
        await asyncio.sleep(0)
    return pace


def _raise(said: object) -> None:
    raise AssertionError(said)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., EngineThread]]:
    """Start engine threads, and end them."""
    threads: list[EngineThread] = []

    def run(
        engine: Engine,
        on_output: Callable[[StepOutput], None],
        on_fault: Callable[[BaseException], None] = _raise,
    ) -> EngineThread:
        threads.append(EngineThread(engine, on_output=on_output, on_fault=on_fault))
        threads[-1].start()
        return threads[-1]

    yield run
    for thread in threads:
        await thread.stop()


async def test_pages_are_reserved_while_a_step_computes(
    start: Callable[..., EngineThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny_model())
    outputs = Outputs()
    gate = Gate(engine, monkeypatch)
    thread = start(engine, outputs.queue.put_nowait)
    thread.submit(Add(request_of("running", 20)), Reserve(request_of("waiting", 20)))
    planned = await outputs.next()
    assert planned.started == ["running"]
    assert [reserved.id for reserved in planned.reserved] == ["waiting"]
    assert not gate.open.is_set()
    gate.open.set()
    assert (await outputs.next()).computed


async def test_exception_in_on_output_is_a_fault(start: Callable[..., EngineThread]) -> None:
    """Otherwise, requests whose output was lost would wait forever."""
    fault: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def lose(output: StepOutput) -> None:
        raise LookupError("no such stream")

    def take(error: BaseException) -> None:
        if not fault.done():
            fault.set_result(error)

    thread = start(engine_of(tiny_model()), lose, take)
    thread.submit(Reserve(request_of("r", 20)))
    assert isinstance(await asyncio.wait_for(fault, LIMIT_S), LookupError)


async def test_stop_abandons_a_thread_that_hangs(
    start: Callable[..., EngineThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny_model())
    outputs = Outputs()
    gate = Gate(engine, monkeypatch)
    thread = start(engine, outputs.queue.put_nowait)
    thread.submit(Add(request_of("r", 20)))
    assert (await outputs.next()).started
    await asyncio.wait_for(thread.stop(wait_s=0.05), LIMIT_S / 2)
    assert outputs.queue.empty()
    gate.open.set()
    assert (await outputs.next()).computed


async def test_thread_that_was_never_started_can_be_stopped() -> None:
    await EngineThread(engine_of(tiny_model()), on_output=_raise, on_fault=_raise).stop()


async def test_load_has_the_rate_of_computed_prompts(
    start: Callable[..., EngineThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny_model(), step_tokens=32, chunk_tokens=32)
    outputs = Outputs()
    gate = Gate(engine, monkeypatch)
    thread = start(engine, outputs.queue.put_nowait)
    thread.submit(Cancel("unknown"))
    await thread.run(lambda _: None)
    assert (thread.load.pending_prompt_tokens, thread.load.prompt_tokens_per_s) == (0, 0)
    thread.submit(Add(request_of("r", 100, 1)))
    await outputs.next()
    await asyncio.sleep(0.2)
    gate.open.set()
    while not (await outputs.next()).ended:
        pass
    await thread.run(lambda _: None)
    assert thread.load.pending_prompt_tokens == 0
    assert 0 < thread.load.prompt_tokens_per_s < 2 * 100 / 0.2  # recent steps have more weight


async def test_rate_counts_chunks_that_are_reported_with_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of a prompt from which tokens are evicted are not reported one by one."""
    monkeypatch.setattr(engine_thread, "_RATE_KNOWN_AFTER_S", 1e-9)
    engine = engine_of(tiny_model(), kv_eviction=0.5, step_tokens=32, chunk_tokens=32)
    outputs: list[StepOutput] = []
    thread = EngineThread(engine, on_output=outputs.append, on_fault=_raise)
    thread.submit(Add(request_of("r", 200, 1)))
    thread._round()
    await asyncio.sleep(0)
    assert [output.computed for output in outputs] == [[]], "its start is reported alone"
    assert thread.load.pending_prompt_tokens == 200 - 32
    assert thread.load.prompt_tokens_per_s > 0


async def test_duration_of_each_plan_is_recorded() -> None:
    thread = EngineThread(engine_of(tiny_model()), on_output=lambda _: None, on_fault=print)
    thread.start()
    thread.submit(Cancel("unknown"))
    await thread.run(lambda _: None)
    assert len(thread.plan_times) == thread.load.steps == 1
    assert thread.plan_times[0] > 0
    await thread.stop()


async def test_step_that_does_not_end_counts_in_the_pace(
    start: Callable[..., EngineThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny_model())
    outputs = Outputs()
    gate = Gate(engine, monkeypatch)
    thread = start(engine, outputs.queue.put_nowait)
    assert thread.pace is None
    gate.open.set()
    thread.submit(Add(request_of("r", 20, 9)))
    while not (await outputs.next()).ended:
        pass
    usual = await pace_when_idle(thread)
    times = list(thread.decode_times)
    assert len(times) == 8, "the first token is sampled in a step that decodes no sequence"
    assert usual.step_s == pytest.approx(sum(times[1:]) / 7)  # the first steps are not counted
    assert thread.inter_token_s == usual.step_s
    assert (usual.tokens, usual.context) == (1, 20 + 1 + 4)
    gate.open.clear()
    thread.submit(Add(request_of("stuck", 20, 2)))
    await outputs.next()
    await asyncio.sleep(0.05 + 16 * usual.step_s)
    stuck = thread.pace
    assert stuck is not None
    assert stuck.idle_s == 0.0
    assert stuck.step_s > 2 * usual.step_s
    assert thread.inter_token_s == usual.step_s
    gate.open.set()
    while not (await outputs.next()).ended:
        pass


async def test_idle_time_is_part_of_the_pace(start: Callable[..., EngineThread]) -> None:
    outputs = Outputs()
    thread = start(engine_of(tiny_model()), outputs.queue.put_nowait)
    thread.submit(Add(request_of("r", 20, 9)))
    while not (await outputs.next()).ended:
        pass
    first = await pace_when_idle(thread)
    await asyncio.sleep(0.05)
    second = thread.pace
    assert second is not None
    assert second.idle_s >= first.idle_s + 0.05
    assert second.step_s == first.step_s


@pytest.mark.parametrize(("device", "progress"), [("cpu", True), ("cuda", False)])
async def test_step_that_uses_the_processor_is_not_stalled(
    start: Callable[..., EngineThread],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    progress: bool,
) -> None:
    """A large step on a slow or busy machine takes minutes; one that hangs uses no processor.

    A thread that waits for a GPU that hangs uses the processor.
    """
    engine = engine_of(tiny_model())
    monkeypatch.setattr(engine.executor, "device", torch.device(device))
    release = threading.Event()
    used = [0.0]
    monkeypatch.setattr(stall, "_processor_s", lambda *_: used[0])
    thread = start(engine, lambda _: None)
    job = thread.run(lambda _: release.wait(LIMIT_S))
    while thread.step_s < 0.05:  # noqa: ASYNC110 - of another thread
        await asyncio.sleep(0.01)
    assert thread.stalled_s >= 0.05
    used[0] += 1
    before = thread.step_s
    assert (thread.stalled_s < before) is progress
    release.set()
    await job


async def test_processor_time_of_a_thread_is_its_own(
    start: Callable[..., EngineThread],
) -> None:
    thread = start(engine_of(tiny_model()), lambda _: None)

    def used_by(thread: int | None) -> float:
        return stall._processor_s(f"self/task/{thread}")

    def work(_: Engine) -> float:
        began = used_by(threading.get_native_id())
        while (used := used_by(threading.get_native_id())) == began:
            sum(range(1000))
        return used

    assert await thread.run(work) > 0
    assert used_by(threading.Thread().native_id) == 0
