"""Sweeps of a simulated single-server queue."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.arrivals import Poisson
from loadgen.check import Check, Difference
from loadgen.config import ArrivalConfig, Process, RunConfig, WorkloadConfig
from loadgen.errors import UsageError
from loadgen.files import read_run, read_sweep
from loadgen.measures import TTFT, Objective, Window
from loadgen.record import Record
from loadgen.run import Outcome
from loadgen.schedule import Limits
from loadgen.summary import Summary
from loadgen.sweep import SweepConfig, parse_rates, sweep
from loadgen.validity import Invalid

SERVICE_S, RUN_S = 0.1, 200.0
CONFIG = RunConfig(
    "http://127.0.0.1:1/v1", WorkloadConfig(), ArrivalConfig(rate=1.0), Limits(duration_s=RUN_S)
)


def queue(config: RunConfig) -> Outcome:
    """Simulate a server that completes ten requests per second, one at a time."""
    rate = config.arrivals.rate
    assert rate is not None
    records = []
    free = 0.0
    for number, due in enumerate(Poisson(rate).times(config.seed)):
        if due >= RUN_S:
            break
        free = max(due, free) + SERVICE_S
        record = Record(number, due, 5, 1, sent=due, times=[free], counts=[1], ended=free)
        records.append(record)
    summary = Summary.of(records, Window(0.0, RUN_S), config.objectives)
    document = {"manifest": {"seed": config.seed}, **summary.as_json()}
    return Outcome(records, summary, document, stopped=False, check=None)


def test_rate_doubles_until_saturation_and_is_refined(tmp_path: Path) -> None:
    logged: list[str] = []
    document = sweep(CONFIG, SweepConfig(seeds=2, refinements=2), tmp_path, queue, logged.append)
    rates = {point["rate"]: point["saturated"] for point in document["points"]}
    assert rates == {1: False, 2: False, 4: False, 8: False, 10: False, 12: True, 16: True}
    # The latency of an M/D/1 queue with service time s and load r is s + s r / (2 (1 - r)). Its
    # power is highest at a load of 0.586, which is 5.86 requests per second.
    assert document["knee"]["rate"] in (4, 8)
    assert len(logged) == 2 * len(rates)
    assert document["stopped"] is False
    assert read_sweep(tmp_path) == document

    busy = next(point for point in document["points"] if point["rate"] == 8)
    expected = SERVICE_S + SERVICE_S * 0.8 / (2 * 0.2)
    assert busy["figures"]["throughput"]["mean"] == pytest.approx(8, rel=0.1)
    assert busy["figures"]["e2e:p50"]["mean"] < expected < busy["figures"]["e2e:p99"]["mean"]
    assert busy["figures"]["attainment"] is None
    for seed, folder in zip(busy["seeds"], busy["folders"], strict=True):
        records, summary = read_run(tmp_path / folder)
        assert summary["manifest"]["seed"] == seed
        assert len(records) == summary["outcomes"]["total"]
    with (tmp_path / "sweep.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [float(row["rate"]) for row in rows] == list(rates)
    assert float(rows[3]["ttft:p50 mean"]) == busy["figures"]["ttft:p50"]["mean"]


def test_only_the_given_rates_are_measured(tmp_path: Path) -> None:
    config = replace(CONFIG, objectives=(Objective(TTFT, 1.0),), seed=7)
    plan = SweepConfig(parse_rates("9,3,20"), seeds=2, attainment=0.95)
    document = sweep(config, plan, tmp_path, queue, print)
    assert [point["rate"] for point in document["points"]] == [3, 9, 20]
    assert document["points"][0]["seeds"] == [7, 8]
    assert document["points"][0]["figures"]["attainment"]["mean"] == 1.0
    assert document["knee"]["rate"] in (3, 9)


def test_invalid_runs_are_reported_and_end_the_doubling(tmp_path: Path) -> None:
    """The load generator is late from 4 requests per second on, with one of the two seeds."""
    late = Invalid("the load generator was late", "Use another machine.")

    def run(config: RunConfig) -> Outcome:
        found = queue(config)
        if (config.arrivals.rate or 0) < 4 or config.seed:
            return found
        return replace(found, summary=replace(found.summary, invalid=late))

    logged: list[str] = []
    plan = SweepConfig(seeds=2, refinements=1)
    document = sweep(CONFIG, plan, tmp_path, run, logged.append)
    assert logged[0] == "1 request per second, seed 0"
    invalid = {point["rate"]: point["invalid_runs"] for point in document["points"]}
    assert invalid == {1: 0, 2: 0, 3: 0, 4: 1}
    assert document["points"][3]["invalid"] == late.reason
    assert document["points"][3]["remedy"] == late.remedy
    assert document["knee"] == {
        "rate": 3, "why": "the highest ratio of throughput to mean latency", "lower_bound": True,
    }  # fmt: skip
    with (tmp_path / "sweep.csv").open(newline="") as table:
        assert [row["invalid"] for row in csv.DictReader(table)] == ["False"] * 3 + ["True"]


def test_interrupted_run_ends_the_sweep_and_is_excluded(tmp_path: Path) -> None:
    def stopped(config: RunConfig) -> Outcome:
        rate = config.arrivals.rate or 0.0
        return replace(queue(config), stopped=rate > 2 and config.seed == 1)

    document = sweep(CONFIG, SweepConfig(seeds=2), tmp_path, stopped, print)
    seeds = {point["rate"]: point["seeds"] for point in document["points"]}
    assert seeds == {1: [0, 1], 2: [0, 1], 4: [0]}
    assert document["stopped"] is True
    assert read_sweep(tmp_path)["stopped"] is True
    assert document["points"][-1]["figures"]["ttft:p50"]["low"] is None
    assert not sweep(CONFIG, SweepConfig((4.0,), 1), tmp_path, lambda r: _ended(r), print)


@pytest.mark.parametrize(
    ("check", "unlike"),
    [
        (Check("http://reference", equal=3, different=(), missing=1), 0),
        (Check("http://reference", 2, (Difference(1, 0, "token", "[1]", "[2]"),), 0), 2),
        (Check("http://reference", equal=0, different=(), missing=3), 2),
    ],
    ids=["equal", "different", "nothing to compare"],
)
def test_runs_with_a_failed_check_are_counted(tmp_path: Path, check: Check, unlike: int) -> None:
    document = sweep(
        CONFIG, SweepConfig((2.0,), 2), tmp_path, lambda r: replace(queue(r), check=check), print
    )
    assert document["points"][0]["unlike"] == unlike


def _ended(config: RunConfig) -> Outcome:
    return replace(queue(config), stopped=True)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0", "-1,2", "inf", "nan"])
def test_invalid_rates_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected rates"):
        parse_rates(text)


def test_arrivals_without_a_rate_are_refused(tmp_path: Path) -> None:
    for arrivals in (
        ArrivalConfig(Process.TRACE),
        ArrivalConfig(Process.RAMP, 1.0, 2.0),
        ArrivalConfig(),
    ):
        with pytest.raises(UsageError):
            sweep(replace(CONFIG, arrivals=arrivals), SweepConfig(), tmp_path, queue, print)
