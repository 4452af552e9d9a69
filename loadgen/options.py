"""Command-line options shared by the commands that send requests.

Each function below declares one group of options and returns the fields of `RunConfig` that they
set. `with_run_options` adds all groups to a command.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from loadgen.config import ArrivalConfig, FileFormat, Process, RunConfig, WorkloadConfig
from loadgen.errors import UsageError
from loadgen.faults import Fault
from loadgen.objectives import Requirement, parse_objective
from loadgen.schedule import Cancellations, Limits
from loadgen.target.base import Endpoint
from loadgen.validity import MAX_LAG_S


def _target_options(
    target: Annotated[
        str,
        typer.Argument(help="http://host:port/v1 or grpc://host:port; commas separate replicas"),
    ],
    model: Annotated[str | None, typer.Option(help="default: the first model listed")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="HTTP endpoint")] = Endpoint.COMPLETIONS,
    texts: Annotated[
        int,
        typer.Option(
            min=1, max=4096, help="texts of each request for embeddings: a prompt in several orders"
        ),
    ] = 1,
    api_key: Annotated[
        str | None, typer.Option(envvar="HEADRACE_LOADGEN_API_KEY", help="bearer token")
    ] = None,
) -> dict[str, Any]:
    return {
        "target": target,
        "model": model,
        "endpoint": endpoint,
        "texts": texts,
        "api_key": api_key,
    }


def _arrival_options(
    arrivals: Annotated[
        Process | None, typer.Option(help="arrival process; default: poisson")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="requests per second; with --turns, chats per second")
    ] = None,
    to_rate: Annotated[float | None, typer.Option(help="final rate of a ramp")] = None,
    burstiness: Annotated[
        float, typer.Option(help="shape of gamma arrivals; 1 is Poisson, less is burstier")
    ] = 1,
    speed: Annotated[float, typer.Option(help="replay speed of a trace")] = 1,
    requests: Annotated[
        int | None, typer.Option(min=1, help="maximum number of requests, or of chats")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="seconds during which requests arrive")
    ] = None,
    warm_up: Annotated[float, typer.Option(min=0, help="seconds to discard at the start")] = 0,
    cool_down: Annotated[float, typer.Option(min=0, help="seconds to discard at the end")] = 0,
    seed: Annotated[
        int, typer.Option(min=0, help="seed of arrival times, prompts and lengths")
    ] = 0,
) -> dict[str, Any]:
    return {
        "arrivals": ArrivalConfig(arrivals, rate, to_rate, burstiness, duration),
        "limits": Limits(requests, duration),
        "speed": speed,
        "warm_up_s": warm_up,
        "cool_down_s": cool_down,
        "seed": seed,
    }


def _workload_options(
    preset: Annotated[
        str | None, typer.Option(help="imdb, arxiv, cocktail, humaneval or pg19")
    ] = None,
    scale: Annotated[float, typer.Option(help="factor on the preset's lengths")] = 1,
    inputs: Annotated[
        str | None, typer.Option("--input", help="prompt lengths, such as lognormal:500,0.6")
    ] = None,
    outputs: Annotated[
        str | None, typer.Option("--output", help="output lengths, such as uniform:10,200")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="file of requests, or a trace")] = None,
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="format of --file")
    ] = FileFormat.PROMPTS,
    prefix_tokens: Annotated[
        int, typer.Option(min=0, help="length of a shared prefix; system prompt of chats")
    ] = 0,
    prefix_groups: Annotated[int, typer.Option(min=1, help="number of shared prefixes")] = 1,
    prefix_skew: Annotated[
        float, typer.Option(help="exponent of Zipf's law for the prefixes; 0: equally often")
    ] = 0,
    turns: Annotated[
        str | None, typer.Option(help="chats with so many turns, such as fixed:8 or uniform:2,12")
    ] = None,
    think: Annotated[
        float, typer.Option(min=0, help="mean seconds from an answer to the next turn")
    ] = 0,
    cold: Annotated[
        bool, typer.Option("--cold", help="begin each prompt with unique words: no cached prefix")
    ] = False,
    token_ids: Annotated[bool, typer.Option(help="send token ids instead of text")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json or its folder")] = None,
    tokenizer_url: Annotated[
        str | None, typer.Option(help="server with /tokenize; default: the target")
    ] = None,
) -> dict[str, Any]:
    workload = WorkloadConfig(
        *(preset, inputs, outputs, file, file_format, scale),
        *(prefix_tokens, prefix_groups, token_ids, prefix_skew),
        *(turns, think, cold),
    )
    return {"workload": workload, "tokenizer": tokenizer, "tokenizer_url": tokenizer_url}


def _request_options(
    cancel: Annotated[
        float, typer.Option(min=0, max=1, help="fraction of requests to cancel midway")
    ] = 0,
    cancel_within: Annotated[
        float | None,
        typer.Option(
            help="with --cancel: cancel at a random time up to this many seconds after the send; "
            "default: after a random number of tokens"
        ),
    ] = None,
    hang_up: Annotated[
        bool,
        typer.Option(
            "--hang-up",
            help="cancel all requests in flight at the end of --duration; they count as unfinished",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(help="seconds per request")] = 600,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="generate up to the full length")] = False,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object merged into each request body")
    ] = None,
) -> dict[str, Any]:
    return {
        "cancellations": Cancellations(cancel, cancel_within),
        "hang_up": hang_up,
        "timeout_s": timeout,
        "temperature": temperature,
        "ignore_eos": ignore_eos,
        "extra": _body_fields(extra_body),
    }


def _evaluation_options(
    objective: Annotated[
        list[str] | None,
        typer.Option(help="per-request objective for goodput, such as ttft=0.5; repeatable"),
    ] = None,
    max_lag: Annotated[
        float,
        typer.Option("--most-lag", help="p99 dispatch lag above which a run is invalid, seconds"),
    ] = MAX_LAG_S,
    metrics: Annotated[
        list[str] | None,
        typer.Option(help="URL of Prometheus metrics; default: /metrics of the target"),
    ] = None,
    check_against: Annotated[
        str | None, typer.Option(help="reference server whose greedy answers must be equal")
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="fault in a local deployment, such as 'kill prefill at 30s'"),
    ] = None,
    gateway_port: Annotated[
        int | None,
        typer.Option(help="gateway port of that deployment; default: the target's port"),
    ] = None,
) -> dict[str, Any]:
    return {
        "objectives": tuple(map(parse_objective, objective or ())),
        "max_lag_s": max_lag,
        "metrics": tuple(metrics or ()),
        "reference": check_against,
        "faults": tuple(map(Fault.parse, fault or ())),
        "gateway_port": gateway_port,
    }


_GROUPS: tuple[Callable[..., dict[str, Any]], ...] = (
    _target_options,
    _arrival_options,
    _workload_options,
    _request_options,
    _evaluation_options,
)


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options to a command, which receives them as ``config: RunConfig``.

    Raises:
        UsageError: when the command runs with invalid options.
    """
    groups = [(group, inspect.signature(group).parameters) for group in _GROUPS]
    shared = [parameter for _, parameters in groups for parameter in parameters.values()]
    own = inspect.signature(command).parameters.values()
    mine = [parameter for parameter in own if parameter.name != "config"]

    @wraps(command)
    def run(**given: Any) -> None:
        fields: dict[str, Any] = {}
        for group, names in groups:
            fields |= group(**{name: given.pop(name) for name in names})
        command(config=RunConfig(**fields), **given)

    parameters = sorted([*shared, *mine], key=lambda one: one.default is not one.empty)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def parse_requirements(texts: list[str] | None) -> tuple[Requirement, ...]:
    return tuple(map(Requirement.parse, texts or ()))


def _body_fields(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        fields = orjson.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra-body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UsageError("--extra-body is not a JSON object")
    return fields
