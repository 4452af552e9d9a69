"""The ``headrace-loadgen`` command.

Exit codes: 0 success; 1 a requirement is not met or an answer differs from the reference; 2 usage
error; 3 the run is invalid; 130 interrupted by the user.

The ``loadgen`` extra (scipy, matplotlib) is imported only by the commands that need it, so that
``--help`` works without it and starts quickly.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.text import Text

from loadgen.compare import Side
from loadgen.compare import compare as compare_sides
from loadgen.config import RunConfig
from loadgen.errors import LoadgenError
from loadgen.extra import require_extra
from loadgen.files import COMPARISON, REPORT, SWEEP, check_folder, read_run, read_sweep
from loadgen.number import counted
from loadgen.options import parse_requirements, with_run_options
from loadgen.run import Outcome, run
from loadgen.sweep import SweepConfig, parse_concurrencies, parse_rates, sweep
from loadgen.table import comparison_table, summary_table, sweep_table

MISSED, INVALID, STOPPED = 1, 3, 130

app = typer.Typer(
    help="Load generator for language model servers, with open and closed loops.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Out = Annotated[Path | None, typer.Option(help="output folder")]
Require = Annotated[
    list[str] | None,
    typer.Option(help="requirement on the run, such as ttft:p99<=0.5; repeatable"),
]


@app.command("run")
@with_run_options
def run_command(
    config: RunConfig,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="closed loop with this many requests or chats in flight, instead of arrivals"
        ),
    ] = None,
    require: Require = None,
    out: Out = None,
) -> None:
    """Send requests on a fixed schedule, or in a closed loop, and report latencies and outcomes."""
    require_extra()
    console = _console()
    requirements = parse_requirements(require)
    config = replace(config, requirements=requirements, concurrency=concurrency)
    if out is not None:
        check_folder(out)
    outcome = run(config, console, sys.argv[1:])
    console.print(summary_table(outcome.summary))
    if out is not None:
        from loadgen.report import run_page, write_page

        outcome.write(out)
        write_page(out / REPORT, run_page(outcome.records, outcome.document))
        _say(console, f"results in {out}, report in {out / REPORT}")
    code = _exit_code(config, outcome, console)
    if code:
        raise typer.Exit(code)


@app.command("sweep")
@with_run_options
def sweep_command(
    config: RunConfig,
    out: Annotated[Path, typer.Option(help="output folder")],
    rates: Annotated[
        str | None,
        typer.Option(help="rates such as 1,2,4; default: double --rate until saturation"),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="closed loops, such as 1,4,16 requests in flight, instead of rates"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs per rate or concurrency")] = 3,
    refine: Annotated[int, typer.Option(min=0, help="bisections around saturation")] = 2,
    attain: Annotated[
        float, typer.Option(min=0, max=1, help="attainment that the knee must reach")
    ] = 0.9,
) -> None:
    """Run the same load at several rates or concurrencies and find the knee."""
    require_extra()
    console = _console()
    plan = SweepConfig(
        parse_rates(rates) if rates is not None else (),
        seeds,
        refine,
        attain,
        parse_concurrencies(concurrency) if concurrency is not None else (),
    )
    check_folder(out)
    run_once = partial(run, console=console, arguments=sys.argv[1:])
    document = sweep(config, plan, out, run_once, partial(_say, console))
    if not document:
        raise typer.Exit(STOPPED)
    from loadgen.report import sweep_page, write_page

    write_page(out / REPORT, sweep_page(document))
    console.print(sweep_table(document, console.width))
    _say(console, f"results in {out}, report in {out / REPORT}")
    if document["stopped"]:
        raise typer.Exit(STOPPED)
    if any(point["invalid"] for point in document["points"]):
        raise typer.Exit(INVALID)
    if unlike := sum(point["unlike"] for point in document["points"]):
        runs = counted(unlike, "run")
        _say(console, f"{runs} with other answers than those of {config.reference}")
        raise typer.Exit(MISSED)


@app.command("compare")
def compare_command(
    a: Annotated[Path, typer.Argument(help="output folder of a run or a sweep")],
    b: Annotated[Path, typer.Argument(help="output folder to compare; ratios are b / a")],
    names: Annotated[str | None, typer.Option(help="names of both, such as before,after")] = None,
    out: Out = None,
) -> None:
    """Compare two runs or two sweeps: ratios of all figures, with confidence intervals."""
    require_extra()
    given = names.split(",") if names else [None, None]
    if len(given) != 2:
        raise typer.BadParameter("expected two names, such as before,after", param_hint="--names")
    document = compare_sides(*(Side.read(*pair) for pair in zip((a, b), given, strict=True)))
    console = _console()
    console.print(comparison_table(document, console.width))
    if out is not None:
        from loadgen.report import compare_page, write_page

        out.mkdir(parents=True, exist_ok=True)
        (out / COMPARISON).write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
        write_page(out / REPORT, compare_page(document))
        _say(console, f"results in {out}, report in {out / REPORT}")


@app.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(help="output folder of a run or a sweep")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file; default: report.html in the folder")
    ] = None,
) -> None:
    """Write the HTML report of an existing run or sweep."""
    require_extra()
    from loadgen.report import run_page, sweep_page, write_page

    if (folder / SWEEP).exists():
        page = sweep_page(read_sweep(folder))
    else:
        page = run_page(*read_run(folder))
    target = out or folder / REPORT
    write_page(target, page)
    _say(_console(), f"report in {target}")


def _console() -> Console:
    return Console(highlight=False)


def _say(console: Console, text: str, style: str = "") -> None:
    """Print a line as it is: not wrapped, so that a path in it can be copied."""
    console.print(Text(text, style), soft_wrap=True)


def _exit_code(config: RunConfig, outcome: Outcome, console: Console) -> int:
    """Print what went wrong and return the exit code."""
    for fault in outcome.document["faults"]:
        if "failed" in fault:
            _say(console, f"fault not injected: {fault['what']}: {fault['failed']}", "red")
    missed = [one for one in config.requirements if not one.met_by(outcome.summary)]
    for requirement in missed:
        value = requirement.figure.format.with_unit(requirement.measured_value(outcome.summary))
        _say(
            console,
            f"requirement not met: {requirement} ({requirement.words}), measured {value}",
            "red",
        )
    if outcome.stopped:
        return STOPPED
    if (invalid := outcome.summary.invalid) is not None:
        console.print(Text(f"invalid run: {invalid.reason}. {invalid.remedy}", "red"))
        return INVALID
    if outcome.check is not None:
        result = outcome.check.as_json()
        _say(
            console,
            f"answers compared with {result['reference']}: {result['equal']} equal, "
            f"{result['different']} different, {result['missing']} missing",
        )
    checked = outcome.check is None or outcome.check.passed
    return 0 if checked and not missed else MISSED


def main() -> None:
    """Run the console script. Print errors, including those of output files, in one line."""
    try:
        app()
    except BrokenPipeError:  # the reader of the output has ended, which is no error of a file
        raise
    except (LoadgenError, OSError) as error:
        print(f"headrace-loadgen: {_described(error)}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


def _described(error: LoadgenError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
