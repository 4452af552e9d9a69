"""One run, from what a user asked for to what is on disk."""

import asyncio
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvloop
from rich.console import Console

from loadgen.clock import Clock
from loadgen.errors import UsageError
from loadgen.files import write_run
from loadgen.live import follow
from loadgen.manifest import manifest
from loadgen.measures import Objective, Window
from loadgen.objectives import Requirement
from loadgen.plan import Bounds, Planned, plan
from loadgen.record import Record
from loadgen.runner import Runner
from loadgen.source import Source, Timing, open_tokenizer
from loadgen.summary import MOST_LAG_S, Summary
from loadgen.target.base import Options, Target
from loadgen.target.http import Endpoint, HttpTarget
from loadgen.target.rpc import RpcTarget

_RPC = "grpc://"


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

    @property
    def is_rpc(self) -> bool:
        return self.target.startswith(_RPC)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True)
class Outcome:
    """What a run came to. ``stopped``: by the user, before its end."""

    records: list[Record]
    summary: Summary
    document: dict[str, Any]
    stopped: bool

    def write(self, folder: Path) -> None:
        write_run(folder, self.records, self.document)


def prepare(request: Request) -> tuple[list[Planned], Options]:
    """Everything that takes time, before anything is sent.

    Raises:
        UsageError: it cannot be run as it was asked for.
    """
    model = request.model or ("" if request.is_rpc else _listed_model(request))
    base = request.tokenizer_url or (None if request.is_rpc else request.target)
    tokenizer = open_tokenizer(request.tokenizer, base, model, request.headers)
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
        extra=request.extra,
    )
    return planned, options


def run(request: Request, console: Console, arguments: Sequence[str] = ()) -> Outcome:
    """Runs it in an event loop of its own. Ctrl-C ends it with what it has.

    Raises:
        UsageError: it cannot be run as it was asked for.
    """
    planned, options = prepare(request)
    _allow_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        name, records, stopped = loop.run(_send(request, planned, options, console))
    window = _window(request, planned)
    summary = Summary.of(records, window, request.objectives, most_lag_s=request.most_lag_s)
    document = {
        "manifest": manifest(name, options.model, request.seed, arguments),
        "stopped": stopped,
        **summary.as_json(),
        "requirements": {
            str(one): {"found": one.found_in(summary), "met": one.met_by(summary)}
            for one in request.requirements
        },
    }
    return Outcome(records, summary, document, stopped)


async def _send(
    request: Request, planned: list[Planned], options: Options, console: Console
) -> tuple[str, list[Record], bool]:
    target = _open(request, options)
    runner, clock = Runner(planned, target), Clock()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, runner.stopped.set)
    following = asyncio.create_task(follow(runner.records, clock, console))
    try:
        await runner.run(clock)
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        await target.close()
    return target.name, runner.records, runner.stopped.is_set()


def _open(request: Request, options: Options) -> Target:
    if request.is_rpc:
        return RpcTarget(request.target.removeprefix(_RPC), options, api_key=request.api_key)
    return HttpTarget(request.target, options, endpoint=request.endpoint, api_key=request.api_key)


def _window(request: Request, planned: Sequence[Planned]) -> Window:
    """From the end of the warm-up to the begin of the cool-down."""
    end = request.bounds.duration_s
    if end is None:  # a last request that is due at the very end counts
        end = planned[-1].due + 1e-9
    begin, end = request.warm_up_s, end - request.cool_down_s
    if begin >= end:
        raise UsageError("nothing is left of the run between its warm-up and its cool-down")
    return Window(begin, end)


def _listed_model(request: Request) -> str:
    try:
        answer = httpx.get(
            f"{request.target.rstrip('/')}/models", headers=request.headers, timeout=30
        )
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        where = urlsplit(request.target).hostname
        raise UsageError(f"{where} lists no model; name one with --model: {error}") from error


def _allow_many_connections() -> None:
    """As many open files as this process may have: each stream is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
