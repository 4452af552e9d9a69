"""The command `headrace size`."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.common.errors import SettingsError
from services.sizing.lengths import Lengths
from services.sizing.measured import Figures
from services.sizing.runs import figures_of_runs
from services.sizing.size import Load, Plan, plan

EXIT_IMPOSSIBLE = 2
UNLIMITED = "unlimited"


def size(
    rate: Annotated[float, typer.Option(min=1e-6, help="requests per second")],
    inputs: Annotated[
        str, typer.Option("--input", help="prompt tokens, such as lognormal:1000,0.6")
    ],
    outputs: Annotated[str, typer.Option("--output", help="output tokens, such as fixed:128")],
    ttft: Annotated[float, typer.Option(min=1e-6, help="target for the first token, seconds")],
    tpot: Annotated[float, typer.Option(min=1e-6, help="target per output token, seconds")],
    percentile: Annotated[
        float, typer.Option(min=50, max=99.9, help="percentage of requests within the targets")
    ] = 95,
    figures: Annotated[
        list[str] | None,
        typer.Option(
            help="measured figures: h200-llama-3-8b (default), cpu-smollm2-135m, a JSON file, or "
            "folders of headrace-loadgen runs with --concurrency; repeat for several folders"
        ),
    ] = None,
    kv_format: Annotated[str, typer.Option(help="KV format of the decode workers")] = "dense",
    utilization: Annotated[
        float, typer.Option(min=0.05, max=0.95, help="maximum utilization of workers and links")
    ] = 0.75,
    link: Annotated[
        str | None,
        typer.Option(
            help="bandwidth of one worker's KV transfers in Gbit/s, or `unlimited`; required, "
            "except with folders of runs as figures"
        ),
    ] = None,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="tokens that all prompts start with, cached on all workers")
    ] = 0,
    spare: Annotated[int, typer.Option(min=0, help="spare workers to add for each role")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Estimate how many prefill and decode workers a load needs, from measured figures."""
    try:
        measured = _figures(figures or ["h200-llama-3-8b"], kv_format)
        load = Load(
            rate=rate,
            prompt=Lengths.parse(inputs),
            answer=Lengths.parse(outputs),
            ttft_s=ttft,
            tpot_s=tpot,
            share=percentile / 100,
            utilization=utilization,
            kv_format=kv_format,
            link_bits_per_s=None if link is None else _bits_per_s(link),
            shared_prefix=shared_prefix,
        )
        result = plan(load, measured)
    except SettingsError as error:
        print(f"headrace size: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(EXIT_IMPOSSIBLE) from None
    if as_json:
        _print_json(load, measured, result, spare)
    else:
        _print_table(load, measured, result, spare)


def _figures(names: list[str], kv_format: str) -> Figures:
    if all(Path(name).is_dir() for name in names):
        return figures_of_runs([Path(name) for name in names], kv_format)
    if len(names) > 1:
        raise SettingsError("several --figures must all be folders of headrace-loadgen runs")
    return Figures.load(names[0])


def _bits_per_s(link: str) -> float:
    """Parse Gbit/s, or `UNLIMITED`."""
    if link == UNLIMITED:
        return math.inf
    try:
        bits_per_s = float(link) * 1e9
    except ValueError:
        bits_per_s = math.nan
    if not 0 < bits_per_s < math.inf:
        raise SettingsError(f"--link must be a number of Gbit/s or `{UNLIMITED}`, not {link!r}")
    return bits_per_s


def _print_json(load: Load, figures: Figures, result: Plan, spare: int) -> None:
    asked = asdict(load) | {"prompt": load.prompt.spec, "answer": load.answer.spec}
    if load.link_bits_per_s == math.inf:  # JSON has no infinity
        asked["link_bits_per_s"] = UNLIMITED
    document = {
        "prefill_workers": result.prefill.workers + spare,
        "decode_workers": result.decode.workers + spare,
        "gateways": result.gateways,
        "load": asked | {"spare": spare},
        "expected": asdict(result),
        "figures": figures.model_dump(mode="json", exclude_none=True),
    }
    print(json.dumps(document, indent=2))  # noqa: T201


def _print_table(load: Load, figures: Figures, result: Plan, spare: int) -> None:
    prefill = result.prefill
    decode = result.decode
    share = f"{100 * load.share:g} %"
    console = Console(highlight=False)
    console.print(
        f"{load.rate:g} requests/s, prompts {load.prompt.spec} (mean {load.prompt.mean:,.0f}), "
        f"answers {load.answer.spec} (mean {load.answer.mean:,.0f})"
        + (f", {load.shared_prefix:,} prompt tokens cached" if load.shared_prefix else "")
    )
    console.print(f"figures: {figures.name}", markup=False)
    expected = f"expected with {prefill.workers} + {decode.workers}"
    table = Table("role", "workers", "limited by", expected, box=None, pad_edge=False)
    table.add_row(
        "prefill",
        str(prefill.workers + spare),
        prefill.limit,
        f"{prefill.utilization:.0%} busy, wait {_ms(prefill.mean_wait_s)} on average; first token "
        f"of {share} within {_ms(prefill.ttft_s)} (target {_ms(load.ttft_s)})",
    )
    usage = "" if decode.kv_usage is None else f", {decode.kv_usage:.0%} of the KV memory"
    table.add_row(
        "decode",
        str(decode.workers + spare),
        decode.limit,
        f"{decode.sequences:.1f} of at most {decode.max_sequences} sequences{usage}; "
        f"{_ms(decode.tpot_s)} per output token (target {_ms(load.tpot_s)})",
    )
    if result.gateways is not None:
        table.add_row("gateway", str(result.gateways), "utilization", "one core each")
    console.print(table)
    _print_transfers(console, load, result)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)


def _print_transfers(console: Console, load: Load, result: Plan) -> None:
    moved = result.transfers
    if moved is None or load.link_bits_per_s is None:
        return
    each = f"{_gbit(moved.prefill_bits_per_s)} per prefill worker, {_gbit(moved.decode_bits_per_s)}"
    console.print(
        f"KV transfers, uncompressed: {_gbit(moved.bits_per_s)} Gbit/s in total, "
        f"{each} per decode worker"
    )
    if math.isinf(load.link_bits_per_s):
        console.print("links: unlimited, as given")
    else:
        console.print(
            f"links: {_gbit(load.link_bits_per_s)} Gbit/s per worker, as given; the KV of a prompt "
            f"takes {_ms(moved.prompt_s)} on average, in part after the first token"
        )


def _gbit(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:,.4g}"


def _ms(seconds: float) -> str:
    if seconds < 5e-7:
        return "0 ms"
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"
