"""One run: prepare the schedule, send the requests, evaluate the records."""

import asyncio
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from loadgen.check import Check, check
from loadgen.clock import Clock
from loadgen.closed_loop import ClosedLoop
from loadgen.config import RunConfig
from loadgen.early_end import EarlyEnd, HangUp
from loadgen.errors import UsageError
from loadgen.faults import FaultInjector
from loadgen.files import write_run
from loadgen.live import follow
from loadgen.lookahead import Lookahead
from loadgen.manifest import manifest
from loadgen.record import Record
from loadgen.runner import Runner
from loadgen.schedule import INSTANT_S, Schedule, ScheduledRequest, make_requests, make_schedule
from loadgen.server import ServerMetrics
from loadgen.summary import Summary
from loadgen.target.api import Api, find_api, is_rpc, shown
from loadgen.target.base import Options
from loadgen.target.choice import auth_headers, first_of, metrics_url, open_target
from loadgen.validity import not_prepared
from loadgen.window import measured_window, planned_window
from loadgen.workload.tokenizer import open_tokenizer


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        records: all requests, in order of their scheduled times. The later turns of chats follow in
            the order in which they became due.
        document: content of ``summary.json``.
        stopped: whether the user interrupted the run.
        check: comparison with the reference; None if it was not requested or was interrupted.
        gave_up: whether the run ended early, because `RunConfig.give_up` was out of reach.
    """

    records: list[Record]
    summary: Summary
    document: dict[str, Any]
    stopped: bool
    check: Check | None
    gave_up: bool = False

    def write(self, folder: Path) -> None:
        write_run(folder, self.records, self.document)


@contextmanager
def prepare(config: RunConfig) -> Iterator[tuple[Schedule | Lookahead, Options]]:
    """Make the request schedule, or the first requests of a closed loop, before anything is sent.

    Target and model of ``config`` are those that `with_found_api` found. The tokenizer stays open
    during the block, for the other requests of a closed loop.

    Raises:
        UsageError: if the configuration cannot be run.
    """
    if config.reference is not None and config.temperature:
        raise UsageError("only greedy answers can be checked: --temperature 0")
    headers = auth_headers(config.api_key)
    model = config.model or ""
    base = config.tokenizer_url or (None if is_rpc(config.target) else first_of(config.target))
    with open_tokenizer(config.tokenizer, base, model, headers) as tokenizer:
        workload = config.workload.open(tokenizer)
        options = Options(
            model,
            config.timeout_s,
            config.temperature,
            ignore_eos=config.ignore_eos,
            keep_answers=config.reference is not None or config.workload.turns is not None,
            token_ids=config.workload.token_ids and config.workload.turns is not None,
            texts=config.texts,
            extra=config.extra,
        )
        if config.concurrency is not None:
            requests = make_requests(
                workload, config.limits, seed=config.seed, cancellations=config.cancellations
            )
            yield Lookahead.of(requests, config.concurrency, config.limits.requests), options
            return
        schedule = make_schedule(
            config.arrivals.open(),
            workload,
            config.limits,
            seed=config.seed,
            cancellations=config.cancellations,
            speed=config.speed,
        )
        yield schedule, options


def run(config: RunConfig, console: Console, arguments: Sequence[str] = ()) -> Outcome:
    """Execute a run in a new event loop. Ctrl-C ends the run and keeps the records so far.

    Raises:
        UsageError: if the configuration cannot be run.
    """
    config = with_found_api(config, console)
    with prepare(config) as (load, options):
        return _run(config, load, options, console, arguments)


def with_found_api(config: RunConfig, console: Console) -> RunConfig:
    """Return the configuration with the root of the target's API and its model.

    Raises:
        UsageError: if they are not found.
    """
    found = find_api(config.target, config.model, auth_headers(config.api_key))
    if found.url != config.target.rstrip("/"):
        roots = ", ".join(map(shown, found.url.split(",")))
        console.print(f"API found at {roots}", soft_wrap=True, markup=False)
    return replace(config, target=found.url, model=found.model)


def _run(
    config: RunConfig,
    load: Schedule | Lookahead,
    options: Options,
    console: Console,
    arguments: Sequence[str],
) -> Outcome:
    planned = planned_window(config, load)
    early_end = EarlyEnd(config.give_up, planned, config.objectives)
    hang_up = HangUp(config.limits.duration_s if config.hang_up else None)
    reference = _reference(config)
    faults = FaultInjector.for_target(config.faults, first_of(config.target), config.gateway_port)
    default_url = metrics_url(config.target)
    urls = config.metrics or ((default_url,) if default_url else ())
    metrics = ServerMetrics(urls, required=bool(config.metrics))
    _raise_open_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        wall, cpu = time.monotonic(), time.process_time()
        name, runner = loop.run(_send(config, load, options, console, faults, early_end, hang_up))
        generator = {"seconds": time.monotonic() - wall, "cpu": time.process_time() - cpu}
        server = metrics.collect()
        checked = None
        stopped = runner.stopped.is_set() and not (early_end.gave_up or hang_up.done)
        if reference is not None and not runner.stopped.is_set():
            checked = loop.run(_check(config, reference, runner, options))
            stopped = checked is None
    summary = Summary.of(
        runner.records, measured_window(config, planned, runner), config.objectives,
        max_lag_s=config.max_lag_s, concurrency=config.concurrency,
        cores=generator["cpu"] / max(generator["seconds"], INSTANT_S),
    )  # fmt: skip
    if isinstance(load, Lookahead) and load.failed is not None:
        summary = replace(summary, invalid=not_prepared(load.failed))
    document = {
        "manifest": manifest(name, options.model, config.seed, arguments),
        "stopped": stopped,
        "gave_up": early_end.gave_up,
        **summary.as_json(),
        "objectives": {one.measure.name: one.seconds for one in config.objectives},
        "requirements": {
            str(one): {"found": one.measured_value(summary), "met": one.met_by(summary)}
            for one in config.requirements
        },
        "generator": generator,
        "lengths": _lengths(runner.records, runner.schedule),
        "server": server,
        "faults": faults.log,
        "check": None if checked is None else checked.as_json(),
    }
    return Outcome(runner.records, summary, document, stopped, checked, early_end.gave_up)


async def _send(
    config: RunConfig,
    load: Schedule | Lookahead,
    options: Options,
    console: Console,
    faults: FaultInjector,
    *ends: EarlyEnd | HangUp,
) -> tuple[str, Runner]:
    target = open_target(config.target, options, config.endpoint, config.api_key)
    clock = Clock()
    duration_s, keep = config.limits.duration_s, config.reference is not None
    if isinstance(load, Lookahead):
        assert config.concurrency is not None
        runner: Runner = ClosedLoop(load, target, config.concurrency, duration_s, keep_answers=keep)
    else:
        runner = Runner(
            load.requests, target, end=load.end, duration_s=duration_s, keep_answers=keep
        )
    try:
        with _on_interrupt(runner.stopped.set):
            async with _in_background(
                follow(runner, clock, console),
                faults.run(clock),
                *(end.watch(runner, clock) for end in ends),
            ):
                with _usage_errors():
                    await runner.run(clock)
    finally:
        await target.close()
    return target.name, runner


@contextmanager
def _on_interrupt(callback: Callable[[], object]) -> Iterator[None]:
    """Call a function on SIGINT during the block; after it, SIGINT raises KeyboardInterrupt."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, callback)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Raise the `UsageError` of a task of the block instead of the group that contains it."""
    try:
        yield
    except ExceptionGroup as group:
        error: Exception | None = group.subgroup(UsageError)
        if error is None:
            raise
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@asynccontextmanager
async def _in_background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines as tasks, and cancel them when the block ends."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def _reference(config: RunConfig) -> Api | None:
    """Return the API of the reference, or None if there is none.

    Raises:
        UsageError: if it is not found.
    """
    if config.reference is None:
        return None
    return find_api(config.reference, None, auth_headers(config.api_key))


async def _check(
    config: RunConfig, reference: Api, runner: Runner, options: Options
) -> Check | None:
    """Compare the answers with the reference; return None if the user interrupts."""
    options = replace(options, model=reference.model)
    target = open_target(reference.url, options, config.endpoint, config.api_key)
    checking = asyncio.create_task(check(runner.records, runner.schedule, target))
    try:
        with _on_interrupt(checking.cancel):
            return await checking
    except asyncio.CancelledError:
        return None
    finally:
        await target.close()


def _lengths(
    records: Sequence[Record], schedule: Sequence[ScheduledRequest]
) -> dict[str, dict[str, int]]:
    """Return the total input and output tokens of successful requests.

    ``asked`` is the number in the schedule, ``counted`` the number in the records.
    """
    pairs = [(r, s.spec) for r, s in zip(records, schedule, strict=True) if r.succeeded]
    return {
        "input": {
            "asked": sum(spec.input_tokens for _, spec in pairs),
            "counted": sum(record.input_tokens for record, _ in pairs),
        },
        "output": {
            "asked": sum(record.wanted_tokens for record, _ in pairs),
            "counted": sum(record.output_tokens for record, _ in pairs),
        },
    }


def _raise_open_file_limit() -> None:
    """Raise the limit of open files to its hard limit: each stream needs a socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
