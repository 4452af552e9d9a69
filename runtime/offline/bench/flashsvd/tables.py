"""Table 5 and Figures 9 to 12 of the FlashSVD v1.5 paper, with our figures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from runtime.offline.bench.flashsvd.paper import OURS, TABLE_5, Figures
from runtime.offline.bench.flashsvd.rows import Case, Row, Rows

_MIB = 2**20
_PEERS = ("naive", "sdpa")


@dataclass(frozen=True)
class Table:
    """A table or figure.

    Attributes:
        about: what it shows.
        cases: the cases that it needs.
        lines: its lines, from the rows of all cases.
    """

    about: str
    cases: Sequence[Case]
    lines: Callable[[Sequence[Case], Mapping[Case, Rows]], Iterator[str]]


def lines(case: Case, rows: Rows) -> Iterator[str]:
    """Yield a line for each backend, with its ratios to ``naive`` and ``sdpa``."""
    yield f"{case}; floor {next(iter(rows.values())).floor_ms:.2f} ms"
    for name, row in rows.items():
        ratios = " ".join(
            f"{_ratio(row.ms, rows[peer].ms)} {_ratio(row.peak, rows[peer].peak)} of {peer};"
            for peer in _PEERS
            if peer in rows
        )
        yield (
            f"  {name:12} {row.ms:8.3f} ms {row.peak / _MIB:7.0f} MiB {row.floor_ms / row.ms:6.1%} "
            f"{ratios} cosine {row.cosine:.5f}"
        )


def backends(cases: Sequence[Case], found: Mapping[Case, Rows]) -> Iterator[str]:
    """Yield time and memory of all backends, and the paper's figures."""
    for case in cases:
        rows = found[case]
        yield (
            f"{case!s:24} {'ms':>7} {'floor':>6} {'of naive':>8} {'of sdpa':>8} {'1/s':>7} "
            f"{'MiB':>6} {'of naive':>8} {'of sdpa':>8} | {'paper ms':>8} {'of naive':>8} "
            f"{'of sdpa':>8} {'MB':>6} {'of naive':>8} {'of sdpa':>8}"
        )
        for name, row in rows.items():
            times, peaks = (
                [_ratio(value(row), value(rows[peer]) if peer in rows else 0) for peer in _PEERS]
                for value in (_time, _peak)
            )
            yield (
                f"  {name:22} {row.ms:7.2f} {row.floor_ms / row.ms:6.0%} {times[0]:>8} "
                f"{times[1]:>8} {case.batch / row.ms * 1e3:7.0f} {row.peak / _MIB:6.0f} "
                f"{peaks[0]:>8} {peaks[1]:>8} | {_of_paper(name)}"
            )


def _of_paper(name: str) -> str:
    figures = TABLE_5.get(OURS if is_ours(name) else name)
    if figures is None:
        return ""
    bases: list[Figures] = [TABLE_5[peer] for peer in _PEERS]
    times = [_ratio(figures.ms, base.ms) for base in bases]
    peaks = [_ratio(figures.peak, base.peak) for base in bases]
    return (
        f"{figures.ms:8.2f} {times[0]:>8} {times[1]:>8} {figures.peak:6.0f} "
        f"{peaks[0]:>8} {peaks[1]:>8}"
    )


def sweep(cases: Sequence[Case], found: Mapping[Case, Rows]) -> Iterator[str]:
    """Yield a line for each case: time and memory, and ours divided by those."""
    names = list(found[cases[0]])
    yield " " * 24 + " ".join(f"{name:>21}" for name in names)
    for case in cases:
        rows = found[case]
        best = next((row for name, row in rows.items() if is_ours(name)), None)
        cells = (_cell(row, best) for row in rows.values())
        yield f"{case!s:24}" + " ".join(cells)


def _cell(row: Row, ours: Row | None) -> str:
    cell = f"{row.ms:6.2f} {row.peak / _MIB:4.0f}"
    if ours is not None and ours is not row:
        cell += f" {_ratio(ours.ms, row.ms)} {_ratio(ours.peak, row.peak)}"
    return f"{cell:21}"


def split(cases: Sequence[Case], found: Mapping[Case, Rows]) -> Iterator[str]:
    """Yield a line for each backend: weights, activations and workspace of each case, in MiB."""
    yield " " * 16 + " ".join(f"{case!s:>34}" for case in cases)
    yield " " * 16 + " ".join([f"{'weights':>12} {'activations':>11} {'rest':>9}"] * len(cases))
    for name in found[cases[0]]:
        rows = [found[case][name] for case in cases]
        yield f"{name:16}" + " ".join(
            f"{row.weights / _MIB:12.0f} {row.activations / _MIB:11.0f} {row.workspace / _MIB:9.0f}"
            for row in rows
        )


def is_ours(name: str) -> bool:
    """Return whether a row is one of our backend, whose names have the tokens of a pass."""
    return name.startswith("ours")


TABLES = {
    "table 5": Table(
        "all backends; the paper's figures are of its task MNLI, its flashsvd15 beside ours",
        [Case("0.5", 32, 512), Case("full", 32, 512)],
        backends,
    ),
    "figure 9": Table("length", [Case("0.5", 32, length) for length in (64, 128, 256, 512)], sweep),
    "figure 10": Table("batch", [Case("0.5", batch, 512) for batch in (1, 8, 32, 128)], sweep),
    "figure 11": Table(
        "time against memory",
        [Case(f"0.{n}", 32, 512) for n in (2, 4, 6, 8)] + [Case("1.0", 32, 512)],
        sweep,
    ),
    "figure 12": Table("memory, in MiB", [Case("0.5", 32, 512), Case("1.0", 32, 512)], split),
}


def wanted(names: Sequence[str]) -> list[Case]:
    """Return the cases of tables, in an order in which each model is built once."""
    cases = {case for name in names for case in TABLES[name].cases}
    return sorted(cases)


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}x" if base else "–"


def _time(row: Row) -> float:
    return row.ms


def _peak(row: Row) -> float:
    return row.peak
