"""Tables that compare the systems of a results document, for the terminal and the report.

Rows of one group were measured with the same parameters. Ratios compare a row with that of the
document's ``baseline``, or of the first system of the group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from loadgen.report import Table
from loadgen.report.number import ms, percent, plain, size

Document = Mapping[str, Any]
Row = Mapping[str, Any]
Cells = Callable[[Row, Row], list[str]]
"""Formats a row, given the row of the baseline."""

_PERCENTILES = ("p50", "p99")
_PAIR = "p50 / p99, ms"


def tables(document: Document) -> dict[str, Table]:
    """Return the tables that have rows, by title."""
    made = {
        "Single requests": single(document),
        "Poisson load": load(document),
        "Highest rate within objectives": search(document),
        "Gaps of running streams": interference(document),
        "Mixes of lengths, closed loop": mixes(document),
        "KV transfer and overhead of mixes": overhead(document),
        "Requests/s of mixes at equal latency": mixes_at_equal_latency(document),
        "Stages and KV transfer": transfer(document),
    }
    return {title: table for title, table in made.items() if table.groups}


def single(document: Document) -> Table:
    def cells(row: Row, base: Row) -> list[str]:
        if "error" in row:
            return [*("–",) * 5, row["error"][:120]]
        return [
            *(ms(row[name]) for name in ("first", "second", "gap")),
            *(_ratio(row, base, itemgetter(name)) for name in ("first", "second")),
            "",
        ]

    return Table(
        [
            ("system", ""),
            *((name, "ms, median") for name in ("first token", "second token", "gap")),
            ("first token", "ratio"),
            ("second token", "ratio"),
            ("remarks", ""),
        ],
        _groups(document, "single", lambda row: f"{row['tokens']:,} tokens", cells),
    )


def load(document: Document) -> Table:
    def cells(row: Row, base: Row) -> list[str]:
        summary = row["summary"]
        goodput = summary["goodput"]
        return [
            *(_percentiles(summary["measures"][name]) for name in ("ttft", "itl", "tpot")),
            plain(summary["throughput"]["requests"]),
            plain(summary["throughput"]["output_tokens"]),
            percent(None if goodput is None else goodput["attainment"]),
            *(_ratio(row, base, _measured(name)) for name in ("ttft", "itl")),
            remarks(summary),
        ]

    return Table(
        [
            ("system", ""),
            *((name, _PAIR) for name in ("first token", "gap", "per output token")),
            ("answered", "requests/s"),
            ("output", "tokens/s"),
            ("attained", "%"),
            ("first token, p99", "ratio"),
            ("gap, p99", "ratio"),
            ("remarks", ""),
        ],
        _groups(document, "load", load_title, cells),
    )


def load_title(row: Row) -> str:
    """Return the title of the group of a load row."""
    seed = f", seed {row['seed']}" if row["seed"] else ""
    return f"{row['rate']:g} requests/s, answers of {row['answer']} tokens{seed}"


def remarks(summary: Row) -> str:
    """Return failures of a run, and why it is invalid."""
    failed = sum(summary["outcomes"]["failed"].values())
    found = [f"{failed} of {summary['outcomes']['total']} failed"] if failed else []
    return "; ".join(found + (["invalid"] if summary["invalid"] else []))


def search(document: Document) -> Table:
    def cells(row: Row, base: Row) -> list[str]:
        return [
            plain(row["passed"]),
            plain(row["failed"]),
            _ratio(row, base, lambda one: one["passed"]),
            ", ".join(row["probes"]),
        ]

    return Table(
        [
            ("system", ""),
            ("highest passing", "requests/s"),
            ("lowest failing", "requests/s"),
            ("highest passing", "ratio"),
            ("attained at each rate", "%"),
        ],
        _groups(document, "search", lambda row: f"answers of {row['answer']} tokens", cells),
    )


def interference(document: Document) -> Table:
    def cells(row: Row, base: Row) -> list[str]:
        if "error" in row:
            return [*("–",) * 5, row["error"][:120]]
        return [
            _percentiles(row["quiet"]),
            _percentiles(row["busy"]),
            f"{row['busy']['p99'] / row['quiet']['p99']:.2f}",
            plain(row["arrived"]["requests"]),
            plain(row["arrived"]["tokens"]),
            "",
        ]

    return Table(
        [
            ("system", ""),
            ("gap, without", _PAIR),
            ("gap, with prompts arriving", _PAIR),
            ("p99", "ratio"),
            ("arrived", "prompts/s"),
            ("arrived", "tokens/s"),
            ("remarks", ""),
        ],
        _groups(document, "interference", lambda row: f"{row['streams']} streams", cells),
    )


def mixes(document: Document) -> Table:
    def cells(row: Row, base: Row) -> list[str]:
        return [
            _percentiles(row["summary"]["measures"]["e2e"]),
            ms(_mean(row, "e2e")),
            ms(_mean(row, "ttft")),
            ms(_mean(row, "tpot")),
            plain(row["summary"]["throughput"]["requests"]),
            *(_ratio(row, base, _mean_of(name)) for name in ("e2e", "ttft", "tpot")),
            _ratio(row, base, lambda one: one["summary"]["throughput"]["requests"]),
            remarks(row["summary"]),
        ]

    return Table(
        [
            ("system", ""),
            ("JCT", _PAIR),
            *((name, "ms, mean") for name in ("JCT", "first token", "per token")),
            ("answered", "requests/s"),
            *((name, "ratio") for name in ("JCT", "first token", "per token", "answered")),
            ("remarks", ""),
        ],
        _groups(document, "mixes", _mix_title, cells),
    )


def overhead(document: Document) -> Table:
    """Return bytes on the wire, and 99th percentiles of overhead as shares of the mean JCT."""

    def cells(row: Row, base: Row) -> list[str]:
        p99, jct = row["p99"], row["summary"]["measures"]["e2e"]
        return [
            plain(row["wire_bytes_per_token"]),
            _ratio(row, base, itemgetter("wire_bytes_per_token")),
            *(_overhead(p99, name, jct) for name in ("kv_encode", "kv_decode", "engine_plan")),
        ]

    return Table(
        [
            ("system", ""),
            ("on the wire", "bytes/token"),
            ("on the wire", "ratio"),
            *((f"{name}, p99", "% of mean JCT") for name in _OVERHEADS),
        ],
        _groups(document, "mixes", _mix_title, cells),
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
    for name, row in _rows(document, "mixes"):
        latency = _mean(row, "normalized_latency")
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


def transfer(document: Document) -> Table:
    """Return stage times and KV transfer of single requests and of load."""

    def cells(row: Row, base: Row) -> list[str]:
        stages = row["stages"]
        seconds = (
            "queue",
            "prefill",
            "transfer",
            "verify",
            "decode",
            "encode",
            "read",
            "decode_kv",
        )
        raw, wire = stages.get("kv_bytes"), stages.get("wire_bytes")
        return [
            *(ms(stages.get(name)) for name in seconds),
            ", ".join(f"{plain(n)} {mode}" for mode, n in stages.get("segments", {}).items()),
            size(raw),
            f"{raw / wire:.3f}" if raw and wire else "–",
        ]

    columns = [
        ("system", ""),
        *((name, "ms, mean") for name in ("queue", "prefill", "transfer", "decode KV", "decode")),
        *((name, "ms/segment") for name in ("encode", "read", "decode KV")),
        ("segments", ""),
        ("KV", ""),
        ("raw / wire", ""),
    ]
    groups = _groups(document, "single", lambda row: f"{row['tokens']:,} tokens", cells, "stages")
    return Table(columns, groups | _groups(document, "load", load_title, cells, "stages"))


def errors(system: Mapping[str, Any]) -> list[str]:
    """Return why a system, or cases of it, could not be measured."""
    found = [system["error"]] if "error" in system else []
    for name, rows in system["cases"].items():
        found += [f"{name}: {row['error']}" for row in rows if row.keys() == {"error"}]
    return found


def _groups(
    document: Document, case: str, title: Callable[[Row], str], cells: Cells, needs: str = ""
) -> dict[str, list[list[str]]]:
    """Group the rows of a case by their title.

    Args:
        needs: key that a row must have, with a value that is not empty.
    """
    found: dict[str, list[tuple[str, Row]]] = {}
    for name, row in _rows(document, case):
        if not needs or row.get(needs):
            found.setdefault(title(row), []).append((name, row))
    baseline = document.get("baseline") or ""
    return {
        group: [[name, *cells(row, dict(rows).get(baseline, rows[0][1]))] for name, row in rows]
        for group, rows in found.items()
    }


def _rows(document: Document, case: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a case, except those of a case that failed as a whole."""
    for system in document["systems"]:
        rows = system["cases"].get(case, ())
        if case == "search":
            rows = _searches(rows)
        for row in rows:
            if row.keys() != {"error"}:
                yield system["name"], row


def _searches(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each answer length: the last bracket, with all rates of the search."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        if "answer" in row:
            probes = found.get(row["answer"], {"probes": []})["probes"]
            early = " (ended early)" if row["gave_up"] else ""
            probe = f"{row['rate']:g}: {percent(row['attainment'])}{early}"
            found[row["answer"]] = row | {"probes": [*probes, probe]}
    return list(found.values())


def _percentiles(found: Row | None) -> str:
    return "–" if found is None else " / ".join(ms(found[name]) for name in _PERCENTILES)


def _measured(name: str) -> Callable[[Row], float | None]:
    def p99(row: Row) -> float | None:
        found = row["summary"]["measures"][name]
        return None if found is None else float(found["p99"])

    return p99


def _mean(row: Row, name: str) -> float | None:
    found = row["summary"]["measures"][name]
    return None if found is None else float(found["mean"])


def _mean_of(name: str) -> Callable[[Row], float | None]:
    return lambda row: _mean(row, name)


def _ratio(row: Row, base: Row, value: Callable[[Row], float | None]) -> str:
    """Return a figure of a row divided by that of the baseline."""
    if row is base or "error" in row or "error" in base:
        return ""
    own, other = value(row), value(base)
    return f"{own / other:.2f}" if own and other else "–"
