"""Throughput by fraction and by number of GPUs: ``python -m runtime.offline.bench.deinfer.plot``.

Draws `tables.figure_1` and `tables.figure_7` of a document of ``tp --paper --json``, beside what
the paper states about its Figures 1 and 7. Only this module needs matplotlib (extra `plots`).
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.offline.bench.deinfer.paper import FRACTION
from runtime.offline.bench.shapes import Kept

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise SystemExit("plots need matplotlib: run `pip install -e '.[plots]'`") from error

_COLORS = ("#d55e00", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9")
"""Palette of Okabe and Ito, which color-blind readers can distinguish."""
_MARKERS = "sxo^vD"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text as text, not as paths: smaller and searchable
    "svg.hashsalt": "headrace",  # reproducible element ids
}
_PAPER = "#555555"
Cells = Sequence[Mapping[str, Any]]
Lines = dict[str, list[tuple[float, float]]]


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write an SVG. It is reproducible: equal documents give bitwise identical files.

    Args:
        document: see `report.document`; it must have Figure 1, and may have Figure 7.
    """
    rows: Cells = [row for row in document["tables"]["figure 1"]["rows"] if row["ours"] is not None]
    if not rows:
        raise ValueError("the document has no measured rows of figure 1")
    most = max(row["ranks"] for row in rows)
    systems = list(dict.fromkeys(row["system"] for row in rows if row["ranks"] == most))
    systems = [system for system in systems if not system.startswith("dense")]
    ratios: Cells = document["tables"].get("figure 7", {}).get("rows", [])
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 6.4), layout="constrained", facecolor="white")
        (by_keep, by_rank), (by_ranks, speed_up) = figure.subplots(2, 2)
        for axes, kept in ((by_keep, Kept.PARAMETERS), (by_rank, Kept.RANKS)):
            _lines(axes, systems, by_fraction(rows, systems, most, kept, "ours"))
            _label_fractions(axes, f"tokens/s, T = {most}", kept)
        _lines(by_ranks, systems, by_number_of_ranks(rows, systems))
        by_ranks.set_title(f"tokens/s, {Kept.RANKS} {FRACTION:g}")
        by_ranks.set_xlabel("GPUs")
        by_ranks.set_xticks(sorted({row["ranks"] for row in rows}))
        _speed_up(speed_up, rows, ratios, systems, most)
        handles = [*by_keep.get_lines(), *speed_up.get_lines()[len(systems) :]]
        labels = [str(line.get_label()) for line in handles]
        figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
        figure.supxlabel(f"ours: {document['device']}; paper: {_cards(document)}", fontsize=9)
        for axes in (by_keep, by_rank, by_ranks, speed_up):
            axes.set_ylim(bottom=0)
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def by_fraction(rows: Cells, systems: Sequence[str], ranks: int, kept: str, field: str) -> Lines:
    """Return the points of each system, by the fraction that the model keeps.

    The dense model with the same collectives is the point of fraction 1 of each system.
    """
    lines: Lines = {}
    for system in systems:
        collectives = system.split(", ")[1]
        own = [
            (row["fraction"], row[field])
            for row in rows
            if row["ranks"] == ranks
            and row[field] is not None
            and (
                (row["system"] == system and row["kept"] == kept)
                or row["system"] == f"dense, {collectives}"
            )
        ]
        lines[system] = sorted(own)
    return lines


def by_number_of_ranks(rows: Cells, systems: Sequence[str]) -> Lines:
    """Return the points of each system, by the number of ranks. One rank is one of each system."""
    return {
        system: sorted(
            (row["ranks"], row["ours"])
            for row in rows
            if row["system"] in (system, "one rank")
            and (row["fraction"], row["kept"]) == (FRACTION, Kept.RANKS)
        )
        for system in systems
    }


def _speed_up(axes: Axes, rows: Cells, ratios: Cells, systems: Sequence[str], most: int) -> None:
    """Draw tokens/s divided by those of the baseline, and the ratios that the paper states."""
    pairs = [row for row in rows if row["fraction"] < 1]
    _lines(axes, systems, by_fraction(pairs, systems, most, Kept.RANKS, "ratio"))
    stated = list(dict.fromkeys(_stated(ratios)))
    if stated:
        fractions, speed_ups, ranks = zip(*stated, strict=True)
        label = "paper, " + ", ".join(f"T = {count}" for count in sorted(set(ranks)))
        axes.plot(fractions, speed_ups, "*", color=_PAPER, markersize=10, label=label)
    _label_fractions(axes, f"speed-up over base, T = {most}", Kept.RANKS)


def _stated(ratios: Cells) -> Iterator[tuple[float, float, int]]:
    """Yield fraction, speed-up and number of GPUs of each ratio of the paper with NVLink."""
    for row in ratios:
        if row["nvlink"] and row["paper_ratio"] is not None:
            yield row["fraction"], row["paper_ratio"], row["paper_ranks"]


def _lines(axes: Axes, systems: Sequence[str], lines: Lines) -> None:
    for number, system in enumerate(systems):
        if points := lines[system]:
            axes.plot(
                *zip(*points, strict=True),
                color=_COLORS[number % len(_COLORS)],
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=4,
                linewidth=1.2,
                label=system,
            )


def _label_fractions(axes: Axes, name: str, kept: Kept) -> None:
    axes.set_title(name)
    axes.set_xlabel(f"{kept} (1: dense)")
    axes.set_xlim(1.05, 0.35)


def _cards(document: Mapping[str, Any]) -> str:
    return str(document["tables"]["figure 1"]["paper_cards"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench.deinfer.plot")
    parser.add_argument("json", type=Path, help="document of `tp --paper --json`")
    parser.add_argument("svg", type=Path, help="plot to write")
    args = parser.parse_args()
    draw(json.loads(args.json.read_text()), args.svg)


if __name__ == "__main__":
    main()
