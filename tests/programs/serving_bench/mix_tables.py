"""Tables of the case `mixes`."""

from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

from loadgen.number import ms, percent, plain
from loadgen.report import Table
from tests.programs.serving_bench.rows import (
    PAIR,
    Document,
    Row,
    groups_of,
    mean_in,
    mean_of,
    percentiles,
    ratio,
    remarks,
    rows_of,
)


def mixes(document: Document) -> Table:
    def cells(row: Row, base: Row) -> list[str]:
        return [
            percentiles(row["summary"]["measures"]["e2e"]),
            ms(mean_in(row, "e2e")),
            ms(mean_in(row, "ttft")),
            ms(mean_in(row, "tpot")),
            plain(row["summary"]["throughput"]["requests"]),
            *(ratio(row, base, mean_of(name)) for name in ("e2e", "ttft", "tpot")),
            ratio(row, base, lambda one: one["summary"]["throughput"]["requests"]),
            remarks(row["summary"]),
        ]

    return Table(
        [
            ("system", ""),
            ("JCT", PAIR),
            *((name, "ms, mean") for name in ("JCT", "first token", "per token")),
            ("answered", "requests/s"),
            *((name, "ratio") for name in ("JCT", "first token", "per token", "answered")),
            ("remarks", ""),
        ],
        groups_of(document, "mixes", _mix_title, cells),
    )


def overhead(document: Document) -> Table:
    """Return bytes on the wire, and 99th percentiles of overhead as shares of the mean JCT."""

    def cells(row: Row, base: Row) -> list[str]:
        p99, jct = row["p99"], row["summary"]["measures"]["e2e"]
        return [
            plain(row["wire_bytes_per_token"]),
            ratio(row, base, itemgetter("wire_bytes_per_token")),
            *(_overhead(p99, name, jct) for name in ("kv_encode", "kv_decode", "engine_plan")),
        ]

    return Table(
        [
            ("system", ""),
            ("on the wire", "bytes/token"),
            ("on the wire", "ratio"),
            *((f"{name}, p99", "% of mean JCT") for name in _OVERHEADS),
        ],
        groups_of(document, "mixes", _mix_title, cells),
    )


_OVERHEADS = ("encode of a segment", "decode of a segment", "plan of a step")


def _mix_title(row: Row) -> str:
    return (
        f"{row['mix']} x {row['scale']:.3g} ({row['tokens']:,} tokens on average), "
        f"{row['concurrency']} requests in flight"
    )


def _overhead(p99: Row, name: str, jct: Row | None) -> str:
    """Return the 99th percentile of a duration in a worker, as a share of the mean JCT."""
    found = [seconds for series, seconds in p99.items() if f"headrace_{name}_seconds" in series]
    return percent(max(found) / jct["mean"]) if found and jct else "–"


def mixes_at_equal_latency(document: Document) -> Table:
    """Compare requests/s at the same mean normalized latency (JCT per output token).

    The latency is that of the baseline at its largest number of requests in flight. Rates between
    measured points are interpolated; beyond them no rate is shown.
    """
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, row in rows_of(document, "mixes"):
        latency = mean_in(row, "normalized_latency")
        if latency is not None:
            point = latency, float(row["summary"]["throughput"]["requests"])
            curves.setdefault(row["mix"], {}).setdefault(name, []).append(point)
    groups = {}
    for mix, systems in curves.items():
        base = systems.get(document.get("baseline") or "", next(iter(systems.values())))
        latency, rate = base[-1]
        title = f"{mix}, {ms(latency)} ms per output token"
        found = [(name, rate_at(points, latency)) for name, points in systems.items()]
        groups[title] = [
            [name, plain(own), f"{own / rate:.2f}" if own else "–"] for name, own in found
        ]
    return Table([("system", ""), ("answered", "requests/s"), ("answered", "ratio")], groups)


def rate_at(points: Sequence[tuple[float, float]], latency: float) -> float | None:
    """Return the rate at a latency, interpolated between (latency, rate) points; None outside."""
    ordered = sorted(points)
    for (low, slower), (high, faster) in pairwise(ordered):
        if low <= latency <= high and high > low:
            return slower + (faster - slower) * (latency - low) / (high - low)
    return next((rate for found, rate in ordered if found == latency), None)
