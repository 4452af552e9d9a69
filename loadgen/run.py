"""One run, from what a user asked for to what is on disk."""

import asyncio
import resource
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from loadgen.check import Check, check
from loadgen.clock import Clock
from loadgen.errors import UsageError
from loadgen.faults import Fault, Faults
from loadgen.files import write_run
from loadgen.live import follow
from loadgen.manifest import manifest
from loadgen.measures import Objective, Window
from loadgen.objectives import Requirement
from loadgen.plan import Bounds, Planned, plan
from loadgen.record import Record
from loadgen.runner import Runner
from loadgen.server import ServerMetrics
from loadgen.source import Source, Timing, open_tokenizer
from loadgen.summary import MOST_LAG_S, Summary
from loadgen.target.base import Options
from loadgen.target.choice import headers_of, is_rpc, listed_model, metrics_of, open_target
from loadgen.target.http import Endpoint


@dataclass(frozen=True)
class Request:
    """All of a run.

    Attributes:
        target: ``http://host:port/v1`` or ``grpc://host:port``.
        model: None: the first one that an HTTP target lists, the only one of a gRPC target.
        tokenizer: a tokenizer.json, or its folder; None: the target's `/tokenize`.
        tokenizer_url: whose `/tokenize`, where it is not the target's.
        warm_up_s, cool_down_s: of a run's begin and end that do not count.
        cancelled: the share of requests whose clients leave.
        objectives: of each request, for goodput.
        requirements: of the run.
        metrics: URLs of the server's metrics; none: the target's own, if it has any.
        reference: a target whose answers the target's must be.
        faults: of a local deployment, whose gateway listens on ``gateway_port``; None: the target's
            port.
    """

    target: str
    source: Source
    timing: Timing
    bounds: Bounds
    model: str | None = None
    endpoint: Endpoint = Endpoint.COMPLETIONS
    api_key: str | None = None
    tokenizer: Path | None = None
    tokenizer_url: str | None = None
    seed: int = 0
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    warm_up_s: float = 0.0
    cool_down_s: float = 0.0
    speed: float = 1.0
    cancelled: float = 0.0
    objectives: tuple[Objective, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    most_lag_s: float = MOST_LAG_S
    metrics: tuple[str, ...] = ()
    reference: str | None = None
    faults: tuple[Fault, ...] = ()
    gateway_port: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run came to. ``stopped``: by the user, before its end."""

    records: list[Record]
    summary: Summary
    document: dict[str, Any]
    stopped: bool
    check: Check | None

    def write(self, folder: Path) -> None:
        write_run(folder, self.records, self.document)


def prepare(request: Request) -> tuple[list[Planned], Options]:
    """Everything that takes time, before anything is sent.

    Raises:
        UsageError: it cannot be run as it was asked for.
    """
    if request.reference is not None and request.temperature:
        raise UsageError("only greedy answers can be checked: --temperature 0")
    headers = headers_of(request.api_key)
    model = request.model or listed_model(request.target, headers)
    base = request.tokenizer_url or (None if is_rpc(request.target) else request.target)
    tokenizer = open_tokenizer(request.tokenizer, base, model, headers)
    planned = plan(
        request.timing.arrivals(),
        request.source.workload(tokenizer),
        request.bounds,
        seed=request.seed,
        cancelled=request.cancelled,
        speed=request.speed,
    )
    options = Options(
        model,
        request.timeout_s,
        request.temperature,
        ignore_eos=request.ignore_eos,
        keep_answers=request.reference is not None,
        extra=request.extra,
    )
    return planned, options


def run(request: Request, console: Console, arguments: Sequence[str] = ()) -> Outcome:
    """Runs it in an event loop of its own. Ctrl-C ends it with what it has.

    Raises:
        UsageError: it cannot be run as it was asked for.
    """
    planned, options = prepare(request)
    window = _window(request, planned)
    reference = _reference(request, options)
    faults = Faults.at(request.faults, request.target, request.gateway_port)
    own = metrics_of(request.target)
    urls = request.metrics or ((own,) if own else ())
    metrics = ServerMetrics(urls, expected=bool(request.metrics))
    _allow_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        began = time.monotonic(), time.process_time()
        name, runner = loop.run(_send(request, planned, options, faults, console))
        spent = {"seconds": time.monotonic() - began[0], "cpu": time.process_time() - began[1]}
        server, checked, stopped = metrics.since(), None, runner.stopped.is_set()
        if request.reference is not None and not stopped:
            checked = loop.run(
                _check(request, request.reference, runner.records, planned, reference)
            )
            stopped = checked is None
    summary = Summary.of(runner.records, window, request.objectives, most_lag_s=request.most_lag_s)
    document = {
        "manifest": manifest(name, options.model, request.seed, arguments),
        "stopped": stopped,
        **summary.as_json(),
        "objectives": {one.measure.name: one.seconds for one in request.objectives},
        "requirements": {
            str(one): {"found": one.found_in(summary), "met": one.met_by(summary)}
            for one in request.requirements
        },
        "generator": spent,
        "lengths": _lengths(runner.records, planned),
        "server": server,
        "faults": faults.done,
        "check": None if checked is None else checked.as_json(),
    }
    return Outcome(runner.records, summary, document, stopped, checked)


async def _send(
    request: Request, planned: list[Planned], options: Options, faults: Faults, console: Console
) -> tuple[str, Runner]:
    target = open_target(request.target, options, request.endpoint, request.api_key)
    runner, clock = Runner(planned, target), Clock()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, runner.stopped.set)
    try:
        async with _beside(follow(runner.records, clock, console), faults.run(clock)):
            await runner.run(clock)
    finally:
        await target.close()
    return target.name, runner


@asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """What goes on meanwhile, and ends with it."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def _reference(request: Request, options: Options) -> Options:
    """What the reference is asked with. Raises UsageError for one that lists no model."""
    if request.reference is None:
        return options
    return replace(options, model=listed_model(request.reference, headers_of(request.api_key)))


async def _check(
    request: Request,
    reference: str,
    records: Sequence[Record],
    planned: Sequence[Planned],
    options: Options,
) -> Check | None:
    """None: the user stopped it."""
    target = open_target(reference, options, request.endpoint, request.api_key)
    checking = asyncio.create_task(check(records, planned, target))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, checking.cancel)
    try:
        return await checking
    except asyncio.CancelledError:
        return None
    finally:
        await target.close()


def _window(request: Request, planned: Sequence[Planned]) -> Window:
    """From the end of the warm-up to the begin of the cool-down."""
    end = request.bounds.duration_s
    if end is None:  # a last request that is due at the very end counts
        end = planned[-1].due + 1e-9
    begin, end = request.warm_up_s, end - request.cool_down_s
    if begin >= end:
        raise UsageError("nothing is left of the run between its warm-up and its cool-down")
    return Window(begin, end)


def _lengths(records: Sequence[Record], planned: Sequence[Planned]) -> dict[str, dict[str, int]]:
    """Tokens of the requests that succeeded, as they were ``asked`` for and as the target counts
    them: what prompts were off by, and what answers that ended early."""
    pairs = [(r, p.ask) for r, p in zip(records, planned, strict=True) if r.succeeded]
    return {
        "input": {
            "asked": sum(ask.input_tokens for _, ask in pairs),
            "counted": sum(record.input_tokens for record, _ in pairs),
        },
        "output": {
            "asked": sum(record.wanted_tokens for record, _ in pairs),
            "counted": sum(record.output_tokens for record, _ in pairs),
        },
    }


def _allow_many_connections() -> None:
    """As many open files as this process may have: each stream is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
