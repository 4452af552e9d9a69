"""Rows of a results document, and cells of tables."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loadgen.number import ms, percent

Document = Mapping[str, Any]
Row = Mapping[str, Any]
Cells = Callable[[Row, Row], list[str]]
"""Formats a row, given the row of the baseline."""

_PERCENTILES = ("p50", "p99")
PAIR = "p50 / p99, ms"


def remarks(summary: Row) -> str:
    """Return failures of a run, and why it is invalid."""
    failed = sum(summary["outcomes"]["failed"].values())
    found = [f"{failed} of {summary['outcomes']['total']} failed"] if failed else []
    return "; ".join(found + (["invalid"] if summary["invalid"] else []))


def groups_of(
    document: Document, case: str, title: Callable[[Row], str], cells: Cells, needs: str = ""
) -> dict[str, list[list[str]]]:
    """Group the rows of a case by their title.

    Args:
        needs: key that a row must have, with a value that is not empty.
    """
    found: dict[str, list[tuple[str, Row]]] = {}
    for name, row in rows_of(document, case):
        if not needs or row.get(needs):
            found.setdefault(title(row), []).append((name, row))
    baseline = document.get("baseline") or ""
    return {
        group: [[name, *cells(row, dict(rows).get(baseline, rows[0][1]))] for name, row in rows]
        for group, rows in found.items()
    }


def rows_of(document: Document, case: str) -> Iterator[tuple[str, Row]]:
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


def percentiles(found: Row | None) -> str:
    return "–" if found is None else " / ".join(ms(found[name]) for name in _PERCENTILES)


def measured(name: str) -> Callable[[Row], float | None]:
    def p99(row: Row) -> float | None:
        found = row["summary"]["measures"][name]
        return None if found is None else float(found["p99"])

    return p99


def mean_in(row: Row, name: str) -> float | None:
    found = row["summary"]["measures"][name]
    return None if found is None else float(found["mean"])


def mean_of(name: str) -> Callable[[Row], float | None]:
    return lambda row: mean_in(row, name)


def ratio(row: Row, base: Row, value: Callable[[Row], float | None]) -> str:
    """Return a figure of a row divided by that of the baseline."""
    if row is base or "error" in row or "error" in base:
        return ""
    own, other = value(row), value(base)
    return f"{own / other:.2f}" if own and other else "–"
