"""The ``headrace-loadgen`` command.

Exit codes: 0 all is well, 1 a requirement is not met, or an answer is not the reference's, 2 it
cannot be run as asked for, 3 the run says nothing of the target, 130 the user stopped it. Reports
are imported where they are made: matplotlib takes its time.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from loadgen.compare import Side
from loadgen.compare import compare as compared
from loadgen.errors import LoadgenError
from loadgen.files import COMPARISON, REPORT, SWEEP, read_run, read_sweep
from loadgen.options import requirements_of, sending
from loadgen.run import Outcome, Request, run
from loadgen.sweep import Plan, parse_rates, sweep
from loadgen.table import comparison_table, summary_table, sweep_table

MISSED, INVALID, STOPPED = 1, 3, 130

app = typer.Typer(
    help="Load for servers of language models: open loop, at times drawn before the run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Out = Annotated[Path | None, typer.Option(help="a folder for what was measured")]
Require = Annotated[
    list[str] | None, typer.Option(help="of the run: ttft:p99<=0.5, attainment>=0.95")
]


@app.command("run")
@sending
def run_command(request: Request, require: Require = None, out: Out = None) -> None:
    """Send requests at their times, and say what became of them."""
    console = Console()
    request = replace(request, requirements=requirements_of(require))
    outcome = run(request, console, sys.argv[1:])
    console.print(summary_table(outcome.summary))
    if out is not None:
        from loadgen.report import run_page, write_page

        outcome.write(out)
        write_page(out / REPORT, run_page(outcome.records, outcome.document))
        console.print(f"written to {out}; {out / REPORT} shows it")
    code = _verdict(request, outcome, console)
    if code:
        raise typer.Exit(code)


@app.command("sweep")
@sending
def sweep_command(
    request: Request,
    out: Annotated[Path, typer.Option(help="a folder for what was measured")],
    rates: Annotated[
        str | None, typer.Option(help="such as 1,2,4; absent: from --rate up to saturation")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each rate")] = 3,
    refine: Annotated[int, typer.Option(min=0, help="rates between the last two")] = 2,
    attain: Annotated[
        float, typer.Option(min=0, max=1, help="share within objectives that the knee has")
    ] = 0.9,
) -> None:
    """Run the same load at several rates until the target is saturated, and find the knee."""
    console = Console()
    plan = Plan(parse_rates(rates) if rates else (), seeds, refine, attain)
    one = partial(run, console=console, arguments=sys.argv[1:])
    document = sweep(request, plan, out, one, console.print)
    if not document:
        raise typer.Exit(STOPPED)
    from loadgen.report import sweep_page, write_page

    write_page(out / REPORT, sweep_page(document))
    console.print(sweep_table(document), f"written to {out}; {out / REPORT} shows it")
    if document["stopped"]:
        raise typer.Exit(STOPPED)
    if invalid := [point["invalid"] for point in document["points"] if point["invalid"]]:
        console.print(f"a run does not count: {invalid[0]}")
        raise typer.Exit(INVALID)
    if unlike := sum(point["unlike"] for point in document["points"]):
        console.print(f"{unlike} runs wrote other answers than {request.reference}, or none")
        raise typer.Exit(MISSED)


@app.command("compare")
def compare_command(
    a: Annotated[Path, typer.Argument(help="the folder of a run, or of a sweep")],
    b: Annotated[Path, typer.Argument(help="another; ratios are of it to the first")],
    names: Annotated[str | None, typer.Option(help="of the two, such as before,after")] = None,
    out: Out = None,
) -> None:
    """Put two runs, or two sweeps, side by side, with ratios and intervals."""
    given = names.split(",") if names else [None, None]
    if len(given) != 2:
        raise typer.BadParameter("two names, such as before,after", param_hint="--names")
    document = compared(*(Side.read(*pair) for pair in zip((a, b), given, strict=True)))
    console = Console()
    console.print(comparison_table(document))
    if out is not None:
        from loadgen.report import compare_page, write_page

        out.mkdir(parents=True, exist_ok=True)
        (out / COMPARISON).write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
        write_page(out / REPORT, compare_page(document))
        console.print(f"written to {out}; {out / REPORT} shows it")


@app.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(help="of a run, or of a sweep")],
    out: Annotated[Path | None, typer.Option(help="a file; the folder's report.html")] = None,
) -> None:
    """Make the report of a run, or of a sweep, once more."""
    from loadgen.report import run_page, sweep_page, write_page

    if (folder / SWEEP).exists():
        page = sweep_page(read_sweep(folder))
    else:
        page = run_page(*read_run(folder))
    target = out or folder / REPORT
    write_page(target, page)
    Console().print(f"written to {target}")


def _verdict(request: Request, outcome: Outcome, console: Console) -> int:
    """The exit code, and why."""
    for fault in outcome.document["faults"]:
        if "failed" in fault:
            console.print(f"{fault['what']} failed: {fault['failed']}")
    missed = [one for one in request.requirements if not one.met_by(outcome.summary)]
    for requirement in missed:
        console.print(f"not met: {requirement}, found {requirement.found_in(outcome.summary)}")
    if outcome.stopped:
        return STOPPED
    if outcome.summary.invalid is not None:
        console.print(f"the run does not count: {outcome.summary.invalid}")
        return INVALID
    if outcome.check is not None:
        told = outcome.check.as_json()
        console.print(
            f"{told['equal']} answers are those of {told['reference']}, {told['different']} are "
            f"not, {told['missing']} are missing"
        )
    checked = outcome.check is None or outcome.check.passed
    return 0 if checked and not missed else MISSED


def main() -> None:
    """The console script."""
    try:
        app()
    except LoadgenError as error:
        print(f"headrace-loadgen: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
