"""The options that all commands have which send requests."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from loadgen.errors import UsageError
from loadgen.faults import Fault
from loadgen.objectives import Requirement, parse_objective
from loadgen.plan import Bounds
from loadgen.run import Request
from loadgen.source import Format, Process, Source, Timing
from loadgen.summary import MOST_LAG_S
from loadgen.target.http import Endpoint


def asked(
    target: Annotated[str, typer.Argument(help="http://host:port/v1 or grpc://host:port")],
    model: Annotated[str | None, typer.Option(help="absent: the first one listed")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="of an HTTP target")] = Endpoint.COMPLETIONS,
    api_key: Annotated[
        str | None, typer.Option(envvar="HEADRACE_LOADGEN_API_KEY", help="a bearer token")
    ] = None,
    arrivals: Annotated[Process, typer.Option(help="when requests come")] = Process.POISSON,
    rate: Annotated[float | None, typer.Option(help="requests a second")] = None,
    to_rate: Annotated[float | None, typer.Option(help="of a ramp's end")] = None,
    burstiness: Annotated[float, typer.Option(help="of gamma; 1 is Poisson, less is burstier")] = 1,
    speed: Annotated[float, typer.Option(help="of a trace's times")] = 1,
    requests: Annotated[int | None, typer.Option(min=1, help="at most")] = None,
    duration: Annotated[float | None, typer.Option(help="seconds in which requests come")] = None,
    warm_up: Annotated[float, typer.Option(min=0, help="seconds that do not count")] = 0,
    cool_down: Annotated[float, typer.Option(min=0, help="seconds that do not count")] = 0,
    preset: Annotated[
        str | None, typer.Option(help="imdb, arxiv, cocktail, humaneval, pg19")
    ] = None,
    scale: Annotated[float, typer.Option(help="of a preset's lengths")] = 1,
    inputs: Annotated[
        str | None, typer.Option("--input", help="tokens of prompts, such as lognormal:500,0.6")
    ] = None,
    outputs: Annotated[
        str | None, typer.Option("--output", help="tokens of answers, such as uniform:10,200")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="of requests, or a trace")] = None,
    file_format: Annotated[Format, typer.Option("--format", help="of the file")] = Format.PROMPTS,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="that prompts share")] = 0,
    prefix_groups: Annotated[int, typer.Option(min=1, help="of prompts that share one")] = 1,
    token_ids: Annotated[bool, typer.Option(help="prompts are token ids, not text")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="a tokenizer.json or its folder")] = None,
    tokenizer_url: Annotated[str | None, typer.Option(help="whose /tokenize; the target's")] = None,
    seed: Annotated[int, typer.Option(help="of times, prompts and lengths")] = 0,
    cancel: Annotated[float, typer.Option(min=0, max=1, help="share of clients that leave")] = 0,
    timeout: Annotated[float, typer.Option(help="seconds for a request")] = 600,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="answers go on to their full length")] = False,
    extra_body: Annotated[str | None, typer.Option(help="JSON fields for bodies")] = None,
    objective: Annotated[
        list[str] | None, typer.Option(help="of a request, for goodput: ttft=0.5; again for more")
    ] = None,
    most_lag: Annotated[
        float, typer.Option(help="seconds by which 99 of 100 requests may be sent late")
    ] = MOST_LAG_S,
    metrics: Annotated[
        list[str] | None, typer.Option(help="URLs of the server's metrics; the target's /metrics")
    ] = None,
    check_against: Annotated[
        str | None, typer.Option(help="a target that must answer the same, token for token")
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(help="of a local deployment: 'kill prefill at 30s'")
    ] = None,
    gateway_port: Annotated[
        int | None, typer.Option(help="of the deployment with the faults; the target's")
    ] = None,
) -> Request:
    """What was asked for. Raises UsageError for what makes no sense."""
    return Request(
        target=target,
        source=Source(
            preset, inputs, outputs, file, file_format, scale, prefix_tokens, prefix_groups,
            token_ids,
        ),
        timing=Timing(arrivals, rate, to_rate, burstiness, duration),
        bounds=Bounds(requests, duration),
        model=model,
        endpoint=endpoint,
        api_key=api_key,
        tokenizer=tokenizer,
        tokenizer_url=tokenizer_url,
        seed=seed,
        timeout_s=timeout,
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra=_body_fields(extra_body),
        warm_up_s=warm_up,
        cool_down_s=cool_down,
        speed=speed,
        cancelled=cancel,
        objectives=tuple(map(parse_objective, objective or ())),
        most_lag_s=most_lag,
        metrics=tuple(metrics or ()),
        reference=check_against,
        faults=tuple(map(Fault.parse, fault or ())),
        gateway_port=gateway_port,
    )  # fmt: skip


def sending(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `asked` before its own; it gets them as ``request``."""
    shared = inspect.signature(asked).parameters
    own = inspect.signature(command).parameters
    mine = [parameter for name, parameter in own.items() if name != "request"]

    @wraps(command)
    def run(**given: Any) -> None:
        request = asked(**{name: given.pop(name) for name in shared})
        command(request=request, **given)

    parameters = sorted([*shared.values(), *mine], key=lambda one: one.default is not one.empty)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def requirements_of(texts: list[str] | None) -> tuple[Requirement, ...]:
    return tuple(map(Requirement.parse, texts or ()))


def _body_fields(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        fields = orjson.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra-body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UsageError("--extra-body is no JSON object")
    return fields
