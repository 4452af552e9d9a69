"""Simulated runs: records of a server with several slots, and documents made from the records."""

import copy
import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.figures import REPORTED
from loadgen.measures import BY_NAME, Objective, Window
from loadgen.objectives import Requirement
from loadgen.record import Failure, Record
from loadgen.statistics import Interval
from loadgen.summary import Summary

HOSTILE = """<script>alert("x")</script>&'\"><img src=http://evil.example/x onerror=alert(1)>"""

_FAILURES = (
    (Failure.REJECTED, '429: {"error": {"message": "too many requests are waiting"}}'),
    (Failure.INTERRUPTED, "the connection was closed before the last event"),
    (Failure.TIMEOUT, "no end within the time limit"),
)
_OBJECTIVES = {"ttft": 0.5, "tpot": 0.04}


def records_of(
    rate: float,
    seconds: float,
    *,
    seed: int = 0,
    slots: int = 24,
    failing: float = 0.0,
    cancelling: float = 0.0,
    tokens: int = 40,
) -> list[Record]:
    """Simulate Poisson arrivals at a server that generates a token of each request every 15 ms.

    Args:
        rate: requests per second.
        slots: number of requests that the server processes concurrently.
        failing, cancelling: fractions of requests that fail or are cancelled.
        tokens: approximate mean of the output tokens per request.
    """
    random = np.random.default_rng(seed)
    dues = np.cumsum(random.exponential(1 / rate, max(1, int(rate * seconds))))
    free = [0.0] * slots
    made = []
    for number, due in enumerate(map(float, dues)):
        wanted = int(random.geometric(1 / tokens)) + 1
        record = Record(number, due, int(random.integers(20, 400)), wanted)
        record.sent = due + float(random.exponential(2e-4))
        begin = max(record.sent, heapq.heappop(free))
        gaps = random.gamma(8, 0.015 / 8, wanted)
        gaps[0] = random.lognormal(np.log(0.06), 0.4)
        record.times = (begin + np.cumsum(gaps)).tolist()
        _end(record, random, failing, cancelling)
        record.counts = [1] * len(record.times)
        heapq.heappush(free, record.ended or begin)
        made.append(record)
    return made


def _end(record: Record, random: np.random.Generator, failing: float, cancelling: float) -> None:
    record.ended = record.times[-1] + 1e-4
    if random.random() < failing:
        record.failure, record.detail = _FAILURES[record.number % len(_FAILURES)]
        record.times = record.times[: len(record.times) // 2 * (record.number % 3 == 1)]
        record.ended = record.times[-1] if record.times else (record.sent or 0) + 0.01
    elif random.random() < cancelling:
        record.cancelled = True
        record.times = record.times[: 1 + len(record.times) // 3]
        record.ended = record.times[-1]


def document_of(
    records: Sequence[Record],
    window: Window,
    *,
    objectives: dict[str, float] | None = None,
    requirements: Sequence[str] = (),
    stopped: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Return a summary document as written by `loadgen.run`."""
    named = _OBJECTIVES if objectives is None else objectives
    summary = Summary.of(records, window, [Objective(BY_NAME[n], s) for n, s in named.items()])
    parsed = [Requirement.parse(text) for text in requirements]
    return {
        "manifest": {
            "started": "2026-01-02T03:04:05+00:00",
            "target": "http://127.0.0.1:8000/v1",
            "model": "smollm2-135m",
            "seed": 0,
            "arguments": ["run", "http://127.0.0.1:8000/v1"],
            "python": "3.11.9",
            "cores": 8,
            "packages": {"headrace": "0.1.0", "grpcio": None},
        },
        "stopped": stopped,
        **summary.as_json(),
        "objectives": dict(named),
        "requirements": {
            str(one): {"found": one.measured_value(summary), "met": one.met_by(summary)}
            for one in parsed
        },
        **more,
    }


def figures_of(document: dict[str, Any]) -> dict[str, float | None]:
    """Return the metrics in `REPORTED` by name, from a summary document."""
    return {str(figure): figure.measured_value(document) for figure in REPORTED}


def interval_of(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return the confidence interval of the mean in JSON format, where infinite ends are null."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    found = Interval.of(known)
    ends = {} if len(known) > 1 else {"low": None, "high": None}
    return vars(found) | ends


def sweep_of(
    rates: Sequence[float], *, seeds: int = 3, slots: int = 24, **options: Any
) -> dict[str, Any]:
    """Return a sweep document whose knee is the highest rate with at least 90 % attainment."""
    points: list[dict[str, Any]] = []
    for rate in rates:
        documents = []
        for seed in range(seeds):
            records = records_of(rate, 40, seed=seed + 10 * int(rate), slots=slots, failing=0.01)
            documents.append(document_of(records, Window(5, 40), **options))
        each = [figures_of(document) for document in documents]
        figures = {name: interval_of([one[name] for one in each]) for name in each[0]}
        failed = sum((Counter(one["outcomes"]["failed"]) for one in documents), Counter[str]())
        answered = figures["throughput"]
        points.append({
            "rate": rate,
            "seeds": list(range(seeds)),
            "folders": [f"rate-{rate:g}/seed-{seed}" for seed in range(seeds)],
            "figures": figures,
            "saturated": answered is not None and answered["mean"] < 0.9 * rate,
            "failed": dict(failed),
            "invalid": None,
            "remedy": None,
            "invalid_runs": 0,
        })  # fmt: skip
    good = [
        point["rate"]
        for point in points
        if point["figures"]["attainment"] and point["figures"]["attainment"]["mean"] >= 0.9
    ]
    why = "the highest rate with 90 % within objectives"
    return {
        "manifest": documents[0]["manifest"],
        "points": points,
        "knee": {"rate": max(good), "why": why, "lower_bound": False} if good else None,
        "no_knee": None if good else "each rate is saturated",
    }


def overloaded_sweep_of(sweep: dict[str, Any]) -> dict[str, Any]:
    """Return a sweep with the load generator late at all rates but the lowest, its knee."""
    sweep = copy.deepcopy(sweep)
    for point in sweep["points"][1:]:
        point |= {
            "invalid": "the load generator was late: p99 dispatch lag is 41.0 ms, the limit is "
            "10 ms",
            "remedy": "Other programs delayed it: run it on another machine, or lower the rate.",
            "invalid_runs": 2,
        }
    lowest = sweep["points"][0]["rate"]
    sweep["knee"] = {"rate": lowest, "why": "the highest rate", "lower_bound": True}
    return sweep


def comparison_of(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Return a comparison document of two sweeps at the same rates."""
    rows = []
    for one, other in zip(a["points"], b["points"], strict=True):
        for name in one["figures"]:
            left, right = one["figures"][name], other["figures"][name]
            if left is not None and right is not None:
                rows.append({
                    "rate": one["rate"], "figure": name, "title": name, "unit": "s",
                    "better": "more" if name in _MORE else "less",
                    "a": left, "b": right, "ratio": _ratio(left, right),
                })  # fmt: skip
    return {
        "a": {"name": "colocated", "manifest": a["manifest"]},
        "b": {"name": "disaggregated", "manifest": b["manifest"]},
        "rows": rows,
    }


_MORE = ("throughput", "output_tokens", "attainment", "goodput")


def _ratio(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any] | None:
    """Return an approximate interval of the ratio: the interval of b divided by the mean of a."""
    if not a["mean"]:
        return None
    ends = {"low": None, "high": None}
    if b["low"] is not None:
        ends = {"low": max(b["low"] / a["mean"], 1e-3), "high": b["high"] / a["mean"]}
    return b | {"mean": b["mean"] / a["mean"]} | ends
