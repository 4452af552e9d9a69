"""Two runs, or two sweeps, side by side: each figure of both, and the ratio, with intervals.

Intervals of sweeps are of their runs: of the logarithms of ratios, in pairs where both sides had
the same seeds, and so the same requests at the same times. Those of single runs are of their
requests, drawn again (`statistics.resampled`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.errors import UsageError
from loadgen.figures import SHOWN, Figure
from loadgen.files import SWEEP, read_run, read_sweep
from loadgen.measures import BY_NAME, Window
from loadgen.record import Record
from loadgen.statistics import Interval, interval_of, ratio_of, resampled


@dataclass(frozen=True)
class Runs:
    """At one rate: summaries, and their seeds. ``records`` are those of a run that is alone."""

    seeds: tuple[int, ...]
    summaries: tuple[dict[str, Any], ...]
    records: tuple[Record, ...] = ()


@dataclass(frozen=True)
class Side:
    """What is compared: by rate, of which a single run has none."""

    name: str
    manifest: dict[str, Any]
    runs: dict[float | None, Runs]

    @classmethod
    def read(cls, folder: Path, name: str | None = None) -> "Side":
        """A run's or a sweep's folder; its name, if it is given no other, is the folder's.

        Raises:
            UsageError: it is neither.
        """
        name = name or folder.resolve().name
        if not (folder / SWEEP).exists():
            records, summary = read_run(folder)
            runs = Runs((summary["manifest"]["seed"],), (summary,), tuple(records))
            return cls(name, summary["manifest"], {None: runs})
        sweep = read_sweep(folder)
        return cls(
            name,
            sweep["manifest"],
            {
                float(point["rate"]): Runs(
                    tuple(point["seeds"]),
                    tuple(read_run(folder / one)[1] for one in point["folders"]),
                )
                for point in sweep["points"]
            },
        )


def compare(a: Side, b: Side) -> dict[str, Any]:
    """Every figure that both have, at every rate that both have; ratios are b over a.

    Raises:
        UsageError: they have no rate in common.
    """
    rates = [rate for rate in a.runs if rate in b.runs]
    if not rates:
        raise UsageError(f"{a.name} and {b.name} have no rate in common: a run, or other rates")
    rows = [
        row
        for rate in rates
        for figure in SHOWN
        if (row := _row(rate, figure, a.runs[rate], b.runs[rate])) is not None
    ]
    sides = ({"name": side.name, "manifest": side.manifest} for side in (a, b))
    return {**dict(zip("ab", sides, strict=True)), "rows": rows}


def _row(rate: float | None, figure: Figure, a: Runs, b: Runs) -> dict[str, Any] | None:
    values = [[figure.found_in(one) for one in side.summaries] for side in (a, b)]
    if any(value is None for side in values for value in side):
        return None
    found = [[value for value in side if value is not None] for side in values]
    intervals, ratio = [Interval.of(side).within(0.0, figure.most) for side in found], None
    draws = [_draws(figure, side) for side in (a, b)]
    if draws[0] is not None and draws[1] is not None:
        intervals = [interval_of(side[0], drawn) for side, drawn in zip(found, draws, strict=True)]
        if found[0][0] > 0 and draws[0].min() > 0:
            ratio = interval_of(found[1][0] / found[0][0], draws[1] / draws[0])
    else:
        ratio = ratio_of(*found, paired=a.seeds == b.seeds)
    return {
        "rate": rate,
        "figure": str(figure),
        "title": figure.title,
        "unit": figure.unit,
        "better": figure.better,
        "a": intervals[0].as_json(),
        "b": intervals[1].as_json(),
        "ratio": None if ratio is None else ratio.as_json(),
    }


def _draws(figure: Figure, runs: Runs) -> Any:
    """Of a run that is alone, for measures; None elsewhere."""
    if figure.statistic is None or not runs.records:
        return None
    window = Window(**runs.summaries[0]["window"])
    groups: list[Sequence[float]] = [
        values for one in window.due(runs.records) if (values := BY_NAME[figure.name].of(one))
    ]
    return resampled(groups, figure.statistic) if groups else None
