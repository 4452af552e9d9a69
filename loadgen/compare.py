"""Comparison of two runs or two sweeps: values of both, and ratios, with confidence intervals.

For sweeps, the intervals of ratios are computed from the variation between runs, on logarithms.
Runs are paired if both sides used the same seeds, because both then sent the same requests; in an
open loop, also at the same times. A closed loop is not compared with an open one: its load depends
on the server. For single runs, intervals are computed by resampling the requests
(`statistics.bootstrap`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.axis import Axis, axis_of, axis_with
from loadgen.errors import UsageError
from loadgen.figures import REPORTED, Figure
from loadgen.files import SWEEP, read_run, read_sweep
from loadgen.measures import BY_NAME, Window
from loadgen.number import counted
from loadgen.record import Record
from loadgen.statistics import Interval, bootstrap, bootstrap_interval, ratio_interval


@dataclass(frozen=True)
class Runs:
    """Runs at one offered rate or concurrency.

    Attributes:
        seeds: seed of each run.
        summaries: summary document of each run.
        records: requests of a single run; empty for the runs of a sweep.
    """

    seeds: tuple[int, ...]
    summaries: tuple[dict[str, Any], ...]
    records: tuple[Record, ...] = ()


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        runs: runs by offered rate in requests per second, or by concurrency; the key is None for a
            single run.
    """

    name: str
    manifest: dict[str, Any]
    runs: dict[float | None, Runs]

    @property
    def axis(self) -> Axis:
        summaries = (summary for runs in self.runs.values() for summary in runs.summaries)
        found = [(one.get("concurrency") is not None, bool(one.get("turns"))) for one in summaries]
        return axis_with(
            closed=any(closed for closed, _ in found), chats=any(chats for _, chats in found)
        )

    @classmethod
    def read(cls, folder: Path, name: str | None = None) -> "Side":
        """Read the output folder of a run or a sweep.

        Args:
            name: name in the report; default: the folder's name.

        Raises:
            UsageError: if the folder contains neither a run nor a sweep.
        """
        name = name or folder.resolve().name
        if not (folder / SWEEP).exists():
            records, summary = read_run(folder)
            runs = Runs((summary["manifest"]["seed"],), (summary,), tuple(records))
            return cls(name, summary["manifest"], {None: runs})
        sweep = read_sweep(folder)
        axis = axis_of(sweep["points"])
        return cls(
            name,
            sweep["manifest"],
            {
                float(point[axis.name]): Runs(
                    tuple(point["seeds"]),
                    tuple(read_run(folder / one)[1] for one in point["folders"]),
                )
                for point in sweep["points"]
            },
        )


def compare(a: Side, b: Side) -> dict[str, Any]:
    """Compare the metrics measured on both sides at each common rate or concurrency.

    Ratios are b / a. ``invalid`` lists the invalid runs that are part of it.

    Raises:
        UsageError: if the sides have no rate or concurrency in common, or only one is a closed
            loop, or plays chats.
    """
    axis = a.axis
    if b.axis != axis:
        what = "plays chats" if b.axis.is_closed == axis.is_closed else "is a closed loop"
        raise UsageError(f"{a.name} and {b.name} cannot be compared: only one of them {what}")
    loads = [load for load in a.runs if load in b.runs]
    if not loads:
        raise UsageError(f"{a.name} and {b.name} have no {axis.name} in common")
    rows = [
        {axis.name: load, "chats": axis.counts_chats, **row}
        for load in loads
        for figure in REPORTED
        if (row := _row(figure, a.runs[load], b.runs[load])) is not None
    ]
    sides = ({"name": side.name, "manifest": side.manifest} for side in (a, b))
    invalid = [text for side in (a, b) for load in loads for text in _invalid(side, load, axis)]
    return {**dict(zip("ab", sides, strict=True)), "rows": rows, "invalid": invalid}


def _invalid(side: Side, load: float | None, axis: Axis) -> list[str]:
    """Return a message if some runs of ``side`` at ``load`` are invalid, else an empty list."""
    runs = side.runs[load].summaries
    found = [run for run in runs if run["invalid"]]
    if not found:
        return []
    at = "" if load is None else f" at {axis.of(load)}, {len(found)} of {counted(len(runs), 'run')}"
    remedy = found[0].get("remedy") or ""
    return [f"{side.name} is invalid{at}: {found[0]['invalid']}. {remedy}".rstrip()]


def _row(figure: Figure, a: Runs, b: Runs) -> dict[str, Any] | None:
    values = [[figure.measured_value(one) for one in side.summaries] for side in (a, b)]
    if any(value is None for side in values for value in side):
        return None
    found = [[value for value in side if value is not None] for side in values]
    intervals = [Interval.of(side).clipped(0.0, figure.upper_bound) for side in found]
    ratio = None
    draws = [_resampled(figure, side) for side in (a, b)]
    if draws[0] is not None and draws[1] is not None:
        intervals = [
            bootstrap_interval(side[0], drawn) for side, drawn in zip(found, draws, strict=True)
        ]
        if found[0][0] > 0 and draws[0].min() > 0:
            ratio = bootstrap_interval(found[1][0] / found[0][0], draws[1] / draws[0])
    else:
        ratio = ratio_interval(*found, paired=a.seeds == b.seeds)
    return {
        "figure": str(figure),
        "title": figure.title,
        "unit": figure.unit,
        "better": figure.better,
        "a": intervals[0].as_json(),
        "b": intervals[1].as_json(),
        "ratio": None if ratio is None else ratio.as_json(),
    }


def verdict_of(ratio: Mapping[str, Any] | None, better: str) -> str:
    """Return what a ratio b / a says: "better", "worse", "not significant", "one run" or "".

    Args:
        better: ``less`` if smaller values are better, else ``more``.
    """
    if ratio is None:
        return ""
    if ratio["low"] is None or ratio["high"] is None:
        return "one run"
    if ratio["low"] <= 1 <= ratio["high"]:
        return "not significant"
    return "better" if (ratio["high"] < 1) == (better == "less") else "worse"


def _resampled(figure: Figure, runs: Runs) -> Any:
    """Return bootstrap samples of a measure's statistic, computed from the records of a single run.

    Return None if ``runs`` belong to a sweep, if the figure is not a statistic of a measure, or if
    the measure has no values.
    """
    if figure.statistic is None or not runs.records:
        return None
    window = Window(**runs.summaries[0]["window"])
    groups: list[Sequence[float]] = [
        values for one in window.due(runs.records) if (values := BY_NAME[figure.name].of(one))
    ]
    return bootstrap(groups, figure.statistic) if groups else None
