"""Sweep: the same workload at several rates or concurrencies, each with several seeds."""

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from loadgen.axis import Axis, axis_of, axis_with
from loadgen.config import Process, RunConfig
from loadgen.errors import UsageError
from loadgen.figures import REPORTED, Figure
from loadgen.files import SWEEP, SWEEP_TABLE
from loadgen.knee import Point, is_limit, knee, next_rate
from loadgen.run import Outcome
from loadgen.statistics import Interval

_WITH_RATE = (None, Process.POISSON, Process.GAMMA, Process.CONSTANT)
_MAX_RATES = 24
Run = Callable[[RunConfig], Outcome]
Log = Callable[[str], None]


@dataclass(frozen=True)
class SweepConfig:
    """Rates or concurrencies, and seeds of a sweep.

    Attributes:
        rates: offered rates in requests per second. If empty, the sweep starts at the run's rate
            and doubles it until a rate is saturated or invalid.
        seeds: number of runs per rate or concurrency. The first has the run's seed, and seeds are
            consecutive.
        refinements: number of bisections between the highest rate that was sustained and the
            lowest one that was not.
        attainment: fraction of requests that must meet all objectives at the knee.
        concurrencies: numbers of requests in flight, for a sweep of closed loops instead of rates.
    """

    rates: tuple[float, ...] = ()
    seeds: int = 3
    refinements: int = 2
    attainment: float = 0.9
    concurrencies: tuple[int, ...] = ()

    def axis(self, config: RunConfig) -> Axis:
        """Return the axis of the sweep."""
        chats = config.workload.turns is not None
        return axis_with(closed=bool(self.concurrencies), chats=chats)


def parse_rates(text: str) -> tuple[float, ...]:
    """Parse rates such as ``1,2,4``.

    Raises:
        UsageError: if a rate is not a positive number.
    """
    try:
        rates = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise UsageError(f"{text!r}: expected rates such as 1,2,4")
    return rates


def parse_concurrencies(text: str) -> tuple[int, ...]:
    """Parse concurrencies such as ``1,4,16``.

    Raises:
        UsageError: if a concurrency is not an integer of at least 1.
    """
    try:
        concurrencies = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        concurrencies = ()
    if not concurrencies or concurrencies[0] < 1:
        raise UsageError(f"{text!r}: expected concurrencies such as 1,4,16")
    return concurrencies


def sweep(config: RunConfig, plan: SweepConfig, out: Path, run: Run, log: Log) -> dict[str, Any]:
    """Run the sweep and return the content of ``sweep.json``.

    Each run is written to a folder in ``out``. ``sweep.json`` is updated after each rate or
    concurrency. If the user interrupts a run, the sweep ends.

    Raises:
        UsageError: if the arrival process has no rate, no initial rate is given, or rates are
            combined with concurrencies.
    """
    given: list[float] = _given(config, plan)
    axis = plan.axis(config)
    waiting = list(given)
    load = config.arrivals.rate
    measured: list[dict[str, Any]] = []
    points: list[Point] = []
    refinements = plan.refinements
    document: dict[str, Any] = {}
    while waiting or (not given and load is not None):
        load = waiting.pop(0) if waiting else load
        assert load is not None
        at = _at(config, axis, load, len(measured))
        outcomes = _run_load(at, axis, load, plan.seeds, out, run, log)
        if outcomes:
            point = _point(axis, load, outcomes)
            entry = _entry(config.seed, axis, load, outcomes)
            points.append(point)
            measured.append(entry | {"saturated": point.saturated, "saturation": point.saturation})
            document = _document(measured, points, plan.attainment, axis, outcomes[0])
        stopped = len(outcomes) < plan.seeds
        if document:
            document["stopped"] = stopped
            _write(out, document)
        if stopped or len(points) >= _MAX_RATES:
            break
        if not given:
            refining = any(map(is_limit, points))
            load = next_rate(points, refinements)
            refinements -= refining
    return document


def _given(config: RunConfig, plan: SweepConfig) -> list[float]:
    """Return the given rates or concurrencies; empty for rates up to saturation."""
    if plan.concurrencies:
        if plan.rates:
            raise UsageError(
                "--concurrency sweeps closed loops; it cannot be combined with --rates"
            )
        return list(plan.concurrencies)
    if config.arrivals.process not in _WITH_RATE:
        raise UsageError(f"a sweep needs {', '.join(filter(None, _WITH_RATE))} arrivals")
    if not plan.rates and config.arrivals.rate is None:
        raise UsageError("a sweep needs --rates, an initial --rate or --concurrency")
    return list(plan.rates)


def _at(config: RunConfig, axis: Axis, load: float, variant: int) -> RunConfig:
    """Return the configuration of one rate or concurrency.

    Args:
        variant: variant of the prompts, so that no prefix cache holds those of an earlier run.
    """
    config = replace(config, workload=replace(config.workload, variant=variant))
    if axis.is_closed:
        return replace(config, concurrency=int(load))
    return replace(config, arrivals=replace(config.arrivals, rate=load))


def _run_load(
    config: RunConfig, axis: Axis, load: float, seeds: int, out: Path, run: Run, log: Log
) -> list[Outcome]:
    """Run one rate or concurrency with each seed and return the outcomes of the complete runs.

    If the user interrupts a run, the result has fewer than ``seeds`` outcomes.
    """
    outcomes = []
    for seed in range(config.seed, config.seed + seeds):
        log(f"{axis.of(load)}, seed {seed}")
        outcome = run(replace(config, seed=seed))
        outcome.write(out / _folder(axis, load, seed))
        if outcome.stopped:
            break
        outcomes.append(outcome)
    return outcomes


def _folder(axis: Axis, load: float, seed: int) -> str:
    return f"{axis.name}-{load:g}/seed-{seed}"


def _point(axis: Axis, load: float, outcomes: Sequence[Outcome]) -> Point:
    documents = [outcome.document for outcome in outcomes]

    def mean(figure: Figure) -> float | None:
        values = [value for one in documents if (value := figure.measured_value(one)) is not None]
        return sum(values) / len(values) if values else None

    growth = sum(one["in_flight"]["growth"] for one in documents) / len(documents)
    return Point(
        load=load,
        throughput=mean(Figure("throughput")) or 0.0,
        growth=0.0 if axis.is_closed else growth,
        failures=mean(Figure("failures")) or 0.0,
        latency=mean(Figure("e2e", "mean")),
        attainment=mean(Figure("attainment")),
        valid=all(outcome.summary.invalid is None for outcome in outcomes),
    )


def _entry(seed: int, axis: Axis, load: float, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    seeds = range(seed, seed + len(outcomes))
    figures = {}
    for figure in REPORTED:
        found = [figure.measured_value(outcome.document) for outcome in outcomes]
        values = [value for value in found if value is not None]
        complete = len(values) == len(found)
        interval = Interval.of(values).clipped(0.0, figure.upper_bound) if complete else None
        figures[str(figure)] = interval and interval.as_json()
    invalid = [one.summary.invalid for one in outcomes if one.summary.invalid is not None]
    failed = Counter[str]()
    for outcome in outcomes:
        failed.update(outcome.document["outcomes"]["failed"])
    return {
        axis.name: load,
        "chats": axis.counts_chats,
        "seeds": list(seeds),
        "folders": [_folder(axis, load, one) for one in seeds],
        "figures": figures,
        "failed": dict(failed),
        "invalid": invalid[0].reason if invalid else None,
        "remedy": invalid[0].remedy if invalid else None,
        "invalid_runs": len(invalid),
        "unlike": sum(one.check is not None and not one.check.passed for one in outcomes),
    }


def _document(
    measured: Sequence[dict[str, Any]],
    points: Sequence[Point],
    attainment: float,
    axis: Axis,
    first: Outcome,
) -> dict[str, Any]:
    found = knee(points, attainment, axis)
    return {
        "manifest": first.document["manifest"],
        "points": sorted(measured, key=lambda point: float(point[axis.name])),
        "knee": None if found.load is None else found.as_json(axis),
        "no_knee": found.why if found.load is None else None,
    }


def _write(out: Path, document: dict[str, Any]) -> None:
    (out / SWEEP).write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    axis = axis_of(document["points"])
    with (out / SWEEP_TABLE).open("w", newline="") as table:
        rows = csv.writer(table)
        parts = ("mean", "low", "high")
        names = [f"{figure} {part}" for figure in REPORTED for part in parts]
        rows.writerow([axis.name, "runs", "saturated", "invalid", *names])
        for point in document["points"]:
            numbers = [
                None if (found := point["figures"][str(figure)]) is None else found[part]
                for figure in REPORTED
                for part in parts
            ]
            marks = (point["saturated"], point["invalid"] is not None)
            rows.writerow([point[axis.name], len(point["seeds"]), *marks, *numbers])
