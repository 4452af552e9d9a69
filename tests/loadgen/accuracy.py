"""Accuracy of the load generator: ``python -m tests.loadgen.accuracy [--rates 50 100 …]``.

The synthetic server, a separate process, writes 32 tokens per answer at known times. The median and
the 99th percentile of TTFT and ITL are computed from the load generator's records and from the
server's log, and compared. A measurement is accurate if each error is at most 2 ms or 2 %.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen.files import read_run
from loadgen.record import Record
from tests.loadgen.synthetic import Behaviour, serving

TTFT_S, ITL_S, TOKENS = 0.05, 0.02, 32
MAX_ERROR_S, MAX_RELATIVE_ERROR = 0.002, 0.02
CONNECTING_S = 2.0
"""Seconds discarded at the start of the run, while connections are established."""
PERCENTILES = (50, 99)


@dataclass(frozen=True)
class Row:
    """TTFT and ITL errors at one rate, in seconds, for each of `PERCENTILES`."""

    rate: float
    requests: int
    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    tokens_per_second: float
    cpu: float

    @property
    def accurate(self) -> bool:
        """Whether all errors are within the limits."""
        limits = ((self.ttft, TTFT_S), (self.itl, ITL_S))
        return all(
            abs(error) <= max(MAX_ERROR_S, MAX_RELATIVE_ERROR * truth)
            for errors, truth in limits
            for error in errors
        )


def measure(rate: float, seconds: float, flags: Sequence[str] = (), *, rpc: bool = False) -> Row:
    """Run the load generator and compare its results with the server's log."""
    behaviour = Behaviour(ttft_s=TTFT_S, itl_s=ITL_S)
    with tempfile.TemporaryDirectory() as folder, serving(behaviour) as server:
        target = f"grpc://{server.grpc_target}" if rpc else f"{server.url}/v1"
        command = [
            *(sys.executable, "-m", "loadgen", "run", target, "--tokenizer-url", server.url),
            *("--input", "fixed:20", "--output", f"fixed:{TOKENS}", "--rate", str(rate)),
            *("--duration", str(seconds), "--most-lag", "1", "--out", folder, *flags),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        truths = sorted(server.log(), key=lambda truth: truth.read)
        records, summary = read_run(Path(folder))
    first = sum(record.due < CONNECTING_S for record in records)
    records, truths = records[first:], truths[first:]
    return Row(
        rate=rate,
        requests=len(records),
        ttft=_errors([_ttft(r) for r in records], [t.written[0] - t.read for t in truths]),
        itl=_errors(_gaps([r.times for r in records]), _gaps([t.written for t in truths])),
        tokens_per_second=sum(map(len, (r.times for r in records)))
        / summary["generator"]["seconds"],
        cpu=summary["generator"]["cpu"] / summary["generator"]["seconds"],
    )


def _ttft(record: Record) -> float:
    assert record.sent is not None
    return record.times[0] - record.sent


def _gaps(answers: Sequence[Sequence[float]]) -> list[float]:
    return [after - before for times in answers for before, after in pairwise(times)]


def _errors(found: Sequence[float], truth: Sequence[float]) -> tuple[float, ...]:
    measured, expected = (np.percentile(numbers, PERCENTILES) for numbers in (found, truth))
    return tuple(float(error) for error in measured - expected)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loadgen.accuracy")
    parser.add_argument("--rates", type=float, nargs="+", default=[25, 50, 100, 150, 200, 300])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rpc", action="store_true", help="use gRPC instead of HTTP")
    own = parser.parse_args()
    table = Table(
        "requests/s", "tokens/s", "TTFT error, ms, p50, p99", "ITL error", "CPU", "accurate"
    )
    for rate in own.rates:
        row = measure(rate, own.seconds, rpc=own.rpc)
        errors = (" ".join(f"{1e3 * one:+.2f}" for one in errors) for errors in (row.ttft, row.itl))
        table.add_row(
            f"{rate:g}",
            f"{row.tokens_per_second:,.0f}",
            *errors,
            f"{row.cpu:.0%}",
            str(row.accurate),
        )
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
