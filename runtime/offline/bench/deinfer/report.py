"""The command: measures what the chosen tables need, prints them, and writes them as JSON."""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from runtime.errors import KVFormatError
from runtime.kv.names import check_name
from runtime.offline.bench.deinfer.cases import Case, Failure, Place, Result, Results
from runtime.offline.bench.deinfer.paper import MODELS
from runtime.offline.bench.deinfer.passes import Options, measure_place
from runtime.offline.bench.deinfer.rows import Row
from runtime.offline.bench.deinfer.systems import Setting
from runtime.offline.bench.deinfer.tables import TABLES
from runtime.offline.bench.device import describe
from runtime.offline.bench.shapes import SHAPES
from runtime.parallel.partition import Scheme

HOW = """\
Random weights. Times are medians of {runs} passes of an engine, which end with the logits:
sampling, the network and the scheduler are not part of them. Passes are CUDA graphs unless a row
says "no graphs". Measured with one and with {layers} layers; the time of all layers is
extrapolated. First token: mean over prompts that arrive at once; a pass computes at most 1,024
prompt tokens, and decodes the sequences whose prompts are complete. Gap: a decode pass of all
sequences at their mean length. Throughput: generated tokens divided by the time of the prefill
passes and of all decode passes after them. "base" is the paper's baseline, an all-reduce after
every linear layer; "nccl" and "push" are the collectives, "push" those of one kernel through peer
memory. "no NVLink" is NCCL_P2P_DISABLE=1. "of base" is a figure divided by that of the first system
of its block."""


def main() -> None:
    args = _parser().parse_args()
    if args.layers < 2:
        raise SystemExit("--layers must be at least 2")
    setting = Setting(
        args.shape, args.ranks, args.schemes, list(_known(args.kv_formats)), args.divide
    )
    chosen = [f"table {n}" for n in args.tables or ()] + [f"figure {n}" for n in args.figures or ()]
    if args.tables is None and args.figures is None:
        chosen = list(TABLES)
    device = describe(args.device)
    how = HOW.format(runs=args.runs, layers=args.layers)
    print(f"{device}, {max(args.ranks)} ranks at most\n{how}", flush=True)
    options = Options(args.device, args.layers, args.runs)
    found: dict[Case, Result] = {}
    for some in measure(wanted(chosen, setting), options, 60 * args.minutes):
        found |= some
        if args.json:  # after each place, in case the command is ended
            made = document(rows_by_table(chosen, setting, found), vars(args), device, how)
            args.json.write_text(json.dumps(made, indent=1))
    for reason in sorted({each.reason for each in found.values() if isinstance(each, Failure)}):
        print(f"not measured: {reason}")
    for name, rows in rows_by_table(chosen, setting, found).items():
        show(name, rows, device)


def wanted(chosen: Sequence[str], setting: Setting) -> list[Case]:
    """Return the cases of tables, those of the first model first."""
    results = Results()
    rows_by_table(chosen, setting, {}, results)
    shapes = list(setting.shapes)
    return sorted(results.wanted, key=lambda case: shapes.index(case.system.weights.shape))


def rows_by_table(
    chosen: Sequence[str],
    setting: Setting,
    found: Mapping[Case, Result],
    results: Results | None = None,
) -> dict[str, list[Row]]:
    """Return the rows of each table."""
    results = results or Results(found)
    return {name: list(TABLES[name].rows(setting, results)) for name in chosen}


def measure(
    cases: Sequence[Case], options: Options, seconds: float
) -> Iterator[dict[Case, Result]]:
    """Yield the results of each place: more ranks first, and NVLink first.

    Args:
        seconds: time after which the other cases are left out.
    """
    places = sorted({case.place for case in cases}, reverse=True)
    models = {(case.place, case.system.weights) for case in cases}
    print(f"measuring {len(cases)} times of {len(models)} models in {len(places)} process groups")
    start = time.monotonic()
    for place in places:
        own = [case for case in cases if case.place == place]
        found = _measure_place(place, own, options, start + seconds)
        measured = sum(not isinstance(each, Failure) for each in found.values())
        took = time.monotonic() - start
        print(f"{place}: {measured} of {len(own)} times after {took:.0f} s", flush=True)
        yield found


def _measure_place(
    place: Place, cases: Sequence[Case], options: Options, deadline: float
) -> dict[Case, Result]:
    """Return the results of a place. If a rank fails, those of the later cases are failures."""
    found: dict[Case, Result] = {}
    try:
        for one in measure_place(place, cases, options, deadline):
            found[one.case] = one.result
    except RuntimeError as error:
        missing = [case for case in cases if case not in found]
        found |= dict.fromkeys(missing, Failure(f"{place}: {error}"))
    return found


def show(name: str, rows: Sequence[Row], device: str) -> None:
    """Print a table in blocks of rows that differ in their system only."""
    table = TABLES[name]
    print(f"\n{name}: {table.about}\nours: {device}; paper: {table.cards}")
    block = ""
    for row in rows:
        heading = f"{row.model}, {row.place}: {row.figure}" + (f", {row.unit}" if row.unit else "")
        if heading != block:
            block = heading
            print(f"{heading:80} {'ours':>10} {'of base':>8} {'paper':>10} {'of base':>8}  GPUs")
        cells = (
            f"{_number(row.ours):>10} {_ratio(row.ratio):>8} "
            f"{_number(row.paper):>10} {_ratio(row.paper_ratio):>8}"
        )
        print(f"  {row.system:78} {cells}  {row.paper_ranks or ''}".rstrip())


def document(
    tables: Mapping[str, Sequence[Row]], arguments: Mapping[str, object], device: str, how: str
) -> dict[str, object]:
    """Return the tables as a JSON document."""
    return {
        "device": device,
        "how": " ".join(how.split()),
        "arguments": {name: value for name, value in arguments.items() if name != "json"},
        "tables": {
            name: {
                "about": TABLES[name].about,
                "paper_cards": TABLES[name].cards,
                "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
            }
            for name, rows in tables.items()
        },
    }


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _known(kv_formats: Sequence[str]) -> Iterator[str]:
    """Yield the KV formats that exist."""
    for name in kv_formats:
        try:
            check_name(name)
        except KVFormatError as error:
            print(f"without KV format {name}: {error}")
        else:
            yield name


def _parser() -> argparse.ArgumentParser:
    numbers = {
        kind: [int(name.split()[1]) for name in TABLES if name.startswith(kind)]
        for kind in ("table", "figure")
    }
    parser = argparse.ArgumentParser(
        prog="python -m runtime.offline.bench tp --paper",
        description="Reproduce tables and figures of the DeInfer paper (arXiv 2604.17709).",
        epilog="Needs as many GPUs as the largest number of ranks. Each number of ranks above 1 is "
        "measured in two process groups, with NVLink and without. The number of models printed at "
        "the start decides how long this takes; fewer --shape, --ranks, --figures and --layers "
        "take less. With 8 layers, a rank holds at most 20 GB of weights.",
    )
    for kind, known in numbers.items():
        parser.add_argument(
            f"--{kind}s", type=int, nargs="*", choices=known, help=f"numbers of {kind}s; without "
            "--tables and --figures, all of both",
        )  # fmt: skip
    parser.add_argument(
        "--shape", nargs="+", choices=sorted(SHAPES), default=list(MODELS),
        help="models; tables of one model use the first",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    own = [scheme for scheme in Scheme if scheme is not Scheme.BASE]
    parser.add_argument(
        "--schemes", type=Scheme, nargs="+", choices=own, default=own,
        help="schemes to compare with the baseline",
    )  # fmt: skip
    parser.add_argument(
        "--kv-formats", nargs="+", default=["dense", "lowrank"], help="KV formats of these schemes"
    )
    parser.add_argument(
        "--layers", type=int, default=8,
        help="number of layers to measure, at least 2; the time of the others is extrapolated",
    )  # fmt: skip
    parser.add_argument(
        "--divide", type=int, default=1, help="divide the numbers of sequences, for a test"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each pass")
    parser.add_argument(
        "--minutes", type=float, default=9, help="leave out what is not measured after this time"
    )
    parser.add_argument(
        "--json", type=Path, help="also write the tables to this file, which `deinfer.plot` reads"
    )
    return parser
