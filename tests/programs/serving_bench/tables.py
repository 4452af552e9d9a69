"""Tables that compare the systems of a results document, for the terminal and the report.

Rows of one group were measured with the same parameters. Ratios compare a row with that of the
document's ``baseline``, or of the first system of the group.
"""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from loadgen.number import ms, percent, plain, size
from loadgen.report import Table
from tests.programs.serving_bench.mix_tables import mixes, mixes_at_equal_latency, overhead
from tests.programs.serving_bench.rows import (
    PAIR,
    Document,
    Row,
    groups_of,
    measured,
    percentiles,
    ratio,
    remarks,
)


def tables(document: Document) -> dict[str, Table]:
    """Return the tables that have rows, by title."""
    made = {
        "Single requests": single(document),
        "Cached prompts": cached(document),
        "Poisson load": load(document),
        "Highest rate within objectives": search(document),
        "Rate after all clients hung up": hang_ups(document),
        "Gaps of running streams": interference(document),
        "Gaps of constrained streams": constrained(document),
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
            *(ratio(row, base, itemgetter(name)) for name in ("first", "second")),
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
        groups_of(document, "single", lambda row: f"{row['tokens']:,} tokens", cells),
    )


def cached(document: Document) -> Table:
    """Return times to the first tokens without and with a warm prefix cache."""

    def cells(row: Row, base: Row) -> list[str]:
        if "error" in row:
            return [*("–",) * 7, row["error"][:120]]
        cold, warm = row["cold"], row["warm"]
        return [
            *(f"{ms(cold[name])} / {ms(warm[name])}" for name in ("first", "second")),
            *(f"{row['ratio'][name]:.3f}" for name in ("first", "second")),
            plain(warm["cached_tokens"]),
            ratio(row, base, lambda one: one["warm"]["first"]),
            ratio(row, base, lambda one: one["warm"]["second"]),
            "",
        ]

    return Table(
        [
            ("system", ""),
            *((name, "cold / cached, ms, p50") for name in ("first token", "second token")),
            *((name, "cached / cold") for name in ("first token", "second token")),
            ("cached", "tokens, reported"),
            *((name, "ratio, cached") for name in ("first token", "second token")),
            ("remarks", ""),
        ],
        groups_of(
            document,
            "cached",
            lambda row: f"{row['tokens']:,} tokens, the first {row['shared']:,} cached",
            cells,
        ),
    )


def load(document: Document) -> Table:
    def cells(row: Row, base: Row) -> list[str]:
        summary = row["summary"]
        goodput = summary["goodput"]
        return [
            *(percentiles(summary["measures"][name]) for name in ("ttft", "itl", "tpot")),
            plain(summary["throughput"]["requests"]),
            plain(summary["throughput"]["output_tokens"]),
            percent(None if goodput is None else goodput["attainment"]),
            *(ratio(row, base, measured(name)) for name in ("ttft", "itl")),
            remarks(summary),
        ]

    return Table(
        [
            ("system", ""),
            *((name, PAIR) for name in ("first token", "gap", "per output token")),
            ("answered", "requests/s"),
            ("output", "tokens/s"),
            ("attained", "%"),
            ("first token, p99", "ratio"),
            ("gap, p99", "ratio"),
            ("remarks", ""),
        ],
        groups_of(document, "load", load_title, cells),
    )


def load_title(row: Row) -> str:
    """Return the title of the group of a load row."""
    seed = f", seed {row['seed']}" if row["seed"] else ""
    unit = "chats/s" if row.get("shape", "").startswith("chats") else "requests/s"
    return f"{row['rate']:g} {unit}, {answers_title(row)}{seed}"


def search(document: Document) -> Table:
    def cells(row: Row, base: Row) -> list[str]:
        return [
            plain(row["passed"]),
            plain(row["failed"]),
            ratio(row, base, lambda one: one["passed"]),
            plain(row.get("passed_goodput")),
            ", ".join(row["probes"]),
        ]

    return Table(
        [
            ("system", ""),
            ("highest passing", "per second"),
            ("lowest failing", "per second"),
            ("highest passing", "ratio"),
            ("goodput there", "requests/s"),
            ("attained at each rate", "%"),
        ],
        groups_of(document, "search", answers_title, cells),
    )


def answers_title(row: Row) -> str:
    """Return the lengths of answers, and the chats or prefixes of a row if there are any."""
    shape = f", {row['shape']}" if row.get("shape") else ""
    return f"answers of {row['answer']} tokens{shape}"


def hang_ups(document: Document) -> Table:
    def cells(row: Row, base: Row) -> list[str]:
        summary = row["run"]["summary"]
        return [
            plain(row["rate"]),
            plain(row["round"]),
            plain(row["overload"]["summary"]["outcomes"]["unfinished"]),
            percent(row["attainment"]),
            percentiles(summary["measures"]["ttft"]),
            "passed" if row["passes"] else "failed",
        ]

    return Table(
        [
            ("system", ""),
            ("rate", "requests/s"),
            ("round", ""),
            ("hung up", "requests"),
            ("attained", "%"),
            ("first token", PAIR),
            ("objectives", ""),
        ],
        groups_of(document, "hang-ups", lambda row: f"answers of {row['answer']} tokens", cells),
    )


def interference(document: Document) -> Table:
    def cells(row: Row, base: Row) -> list[str]:
        if "error" in row:
            return [*("–",) * 5, row["error"][:120]]
        return [
            percentiles(row["quiet"]),
            percentiles(row["busy"]),
            f"{row['busy']['p99'] / row['quiet']['p99']:.2f}",
            plain(row["arrived"]["requests"]),
            plain(row["arrived"]["tokens"]),
            "",
        ]

    return Table(
        [
            ("system", ""),
            ("gap, without", PAIR),
            ("gap, with prompts arriving", PAIR),
            ("p99", "ratio"),
            ("arrived", "prompts/s"),
            ("arrived", "tokens/s"),
            ("remarks", ""),
        ],
        groups_of(document, "interference", lambda row: f"{row['streams']} streams", cells),
    )


def constrained(document: Document) -> Table:
    """Return gaps of streams, of those beside a constrained one, and of constrained ones."""

    def cells(row: Row, base: Row) -> list[str]:
        if "error" in row:
            return [*("–",) * 5, row["error"][:120]]
        free, beside, bound = (row[name] for name in ("free", "beside_one", "constrained"))
        return [
            *(percentiles(one) for one in (free, beside, bound)),
            *(f"{one['mean'] / free['mean']:.3f}" for one in (beside, bound)),
            "",
        ]

    return Table(
        [
            ("system", ""),
            ("gap, all free", PAIR),
            ("gap beside a constrained stream", PAIR),
            ("gap, all constrained", PAIR),
            ("beside one / free", "means"),
            ("constrained / free", "means"),
            ("remarks", ""),
        ],
        groups_of(document, "constrained", lambda row: f"{row['streams']} streams", cells),
    )


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
    groups = groups_of(document, "single", lambda row: f"{row['tokens']:,} tokens", cells, "stages")
    return Table(columns, groups | groups_of(document, "load", load_title, cells, "stages"))


def errors(system: Mapping[str, Any]) -> list[str]:
    """Return why a system, or cases of it, could not be measured."""
    found = [system["error"]] if "error" in system else []
    for name, rows in system["cases"].items():
        found += [f"{name}: {row['error']}" for row in rows if row.keys() == {"error"}]
    return found
