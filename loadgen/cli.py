"""The ``headrace-loadgen`` command.

Exit codes: 0 all is well, 1 a requirement is not met, 2 it cannot be run as asked for, 3 the run
says nothing of the target, 130 the user stopped it.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from loadgen.errors import LoadgenError, UsageError
from loadgen.objectives import Requirement, parse_objective
from loadgen.plan import Bounds
from loadgen.run import Request, run
from loadgen.source import Format, Process, Source, Timing
from loadgen.summary import MOST_LAG_S
from loadgen.table import summary_table
from loadgen.target.http import Endpoint

MISSED, INVALID, STOPPED = 1, 3, 130

app = typer.Typer(
    help="Load for servers of language models: open loop, at times drawn before the run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """Load for servers of language models: open loop, at times drawn before the run."""


@app.command("run")
def run_command(
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
    require: Annotated[
        list[str] | None, typer.Option(help="of the run: ttft:p99<=0.5, attainment>=0.95")
    ] = None,
    most_lag: Annotated[
        float, typer.Option(help="seconds by which 99 of 100 requests may be sent late")
    ] = MOST_LAG_S,
    out: Annotated[Path | None, typer.Option(help="a folder for what was measured")] = None,
) -> None:
    """Send requests at their times, and say what became of them."""
    console = Console()
    request = Request(
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
        requirements=tuple(map(Requirement.parse, require or ())),
        most_lag_s=most_lag,
    )  # fmt: skip
    outcome = run(request, console, sys.argv[1:])
    console.print(summary_table(outcome.summary))
    if out is not None:
        outcome.write(out)
        console.print(f"written to {out}")
    for requirement in request.requirements:
        if not requirement.met_by(outcome.summary):
            console.print(f"not met: {requirement}, found {requirement.found_in(outcome.summary)}")
    if outcome.stopped:
        raise typer.Exit(STOPPED)
    if outcome.summary.invalid is not None:
        console.print(f"the run does not count: {outcome.summary.invalid}")
        raise typer.Exit(INVALID)
    if not all(one.met_by(outcome.summary) for one in request.requirements):
        raise typer.Exit(MISSED)


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


def main() -> None:
    """The console script."""
    try:
        app()
    except LoadgenError as error:
        print(f"headrace-loadgen: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
