"""A sweep: the same load at several rates, each with several seeds, up to saturation."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from loadgen.errors import UsageError
from loadgen.figures import SHOWN, Figure
from loadgen.files import SWEEP, SWEEP_TABLE
from loadgen.knee import Point, knee, next_rate
from loadgen.run import Outcome, Request
from loadgen.source import Process
from loadgen.statistics import Interval

_RATED = (Process.POISSON, Process.GAMMA, Process.CONSTANT)
_MOST_RATES = 24
Run = Callable[[Request], Outcome]
Log = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        rates: requests a second; empty: from that of the request on, doubled until the target is
            saturated.
        seeds: runs of each rate, with seeds that follow the request's.
        refinements: rates between the last that the target kept up with and the first that it did
            not.
        attainment: share of requests within their objectives that the knee has.
    """

    rates: tuple[float, ...] = ()
    seeds: int = 3
    refinements: int = 2
    attainment: float = 0.9


def parse_rates(text: str) -> tuple[float, ...]:
    """``1,2,4``. Raises UsageError for what is none."""
    try:
        rates = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise UsageError(f"{text}: rates are like 1,2,4")
    return rates


def sweep(request: Request, plan: Plan, out: Path, run: Run, log: Log) -> dict[str, Any]:
    """Runs it all, and writes each run, and the sweep after every rate, into a folder.

    A run that the user stops ends the sweep. The document is that of ``sweep.json``.

    Raises:
        UsageError: arrivals that have no rate, or no rate to begin with.
    """
    if request.timing.process not in _RATED:
        raise UsageError(f"a sweep is of {', '.join(_RATED)} arrivals")
    waiting, rate = list(plan.rates), request.timing.rate
    if not waiting and rate is None:
        raise UsageError("a sweep needs --rates, or a --rate to begin with")
    measured: list[dict[str, Any]] = []
    points: list[Point] = []
    refinements = plan.refinements
    document: dict[str, Any] = {}
    while waiting or (not plan.rates and rate is not None):
        rate = waiting.pop(0) if waiting else rate
        assert rate is not None
        outcomes = _at(request, rate, plan.seeds, out, run, log)
        if outcomes:
            point, shown = _point(rate, outcomes), _shown(request.seed, rate, outcomes)
            points.append(point)
            measured.append(shown | {"saturated": point.saturated})
            document = _document(measured, points, plan, outcomes[0])
        stopped = len(outcomes) < plan.seeds
        if document:
            document["stopped"] = stopped
            _write(out, document)
        if stopped or len(points) >= _MOST_RATES:
            break
        if not plan.rates:
            refining = any(point.saturated for point in points)
            rate = next_rate(points, refinements)
            refinements -= refining
    return document


def _at(request: Request, rate: float, seeds: int, out: Path, run: Run, log: Log) -> list[Outcome]:
    """Fewer than ``seeds``: the user stopped one, which does not count."""
    outcomes = []
    for seed in range(request.seed, request.seed + seeds):
        log(f"{rate:g} requests a second, seed {seed}")
        timing = replace(request.timing, rate=rate)
        outcome = run(replace(request, timing=timing, seed=seed))
        outcome.write(out / _folder(rate, seed))
        if outcome.stopped:
            break
        outcomes.append(outcome)
    return outcomes


def _folder(rate: float, seed: int) -> str:
    return f"rate-{rate:g}/seed-{seed}"


def _point(rate: float, outcomes: Sequence[Outcome]) -> Point:
    documents = [outcome.document for outcome in outcomes]

    def mean(figure: Figure) -> float | None:
        found = [value for one in documents if (value := figure.found_in(one)) is not None]
        return sum(found) / len(found) if found else None

    return Point(
        rate=rate,
        throughput=mean(Figure("throughput")) or 0.0,
        growth=sum(one["in_flight"]["growth"] for one in documents) / len(documents),
        failures=mean(Figure("failures")) or 0.0,
        latency=mean(Figure("e2e", "mean")),
        attainment=mean(Figure("attainment")),
    )


def _shown(seed: int, rate: float, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    seeds = range(seed, seed + len(outcomes))
    figures = {}
    for figure in SHOWN:
        found = [figure.found_in(outcome.document) for outcome in outcomes]
        values = [value for value in found if value is not None]
        whole = len(values) == len(found)
        interval = Interval.of(values).within(0.0, figure.most) if whole else None
        figures[str(figure)] = interval and interval.as_json()
    invalid = next((one.summary.invalid for one in outcomes if one.summary.invalid), None)
    return {
        "rate": rate,
        "seeds": list(seeds),
        "folders": [_folder(rate, one) for one in seeds],
        "figures": figures,
        "invalid": invalid,
        "unlike": sum(one.check is not None and not one.check.passed for one in outcomes),
    }


def _document(
    measured: Sequence[dict[str, Any]], points: Sequence[Point], plan: Plan, first: Outcome
) -> dict[str, Any]:
    return {
        "manifest": first.document["manifest"],
        "points": sorted(measured, key=lambda point: float(point["rate"])),
        "knee": knee(points, plan.attainment),
    }


def _write(out: Path, document: dict[str, Any]) -> None:
    (out / SWEEP).write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    with (out / SWEEP_TABLE).open("w", newline="") as table:
        rows = csv.writer(table)
        parts = ("mean", "low", "high")
        names = [f"{figure} {part}" for figure in SHOWN for part in parts]
        rows.writerow(["rate", "runs", "saturated", *names])
        for point in document["points"]:
            numbers = [
                None if (found := point["figures"][str(figure)]) is None else found[part]
                for figure in SHOWN
                for part in parts
            ]
            rows.writerow([point["rate"], len(point["seeds"]), point["saturated"], *numbers])
