"""Complete runs against the synthetic server."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadgen.files import read_run
from loadgen.statistics import Distribution
from tests.loadgen.command import ANY_LAG, loadgen
from tests.loadgen.synthetic import Behaviour, Outcome, SyntheticServer, closed_port, serving

NEW_LINE = orjson.OPT_APPEND_NEWLINE


def run(
    server: SyntheticServer, folder: Path, *flags: str | Path, rpc: bool = False
) -> tuple[int, str]:
    target = f"grpc://{server.grpc_target}" if rpc else server.url + "/v1"
    own = ("--tokenizer-url", server.url) if rpc else ()
    return loadgen("run", target, *own, *ANY_LAG, *flags, "--out", folder)


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(orjson.loads((folder / "summary.json").read_bytes()))


LENGTHS = ("--input", "fixed:5", "--output", "fixed:8")
BUSY_S = 10.0
"""Seconds of delay tolerated on a busy machine."""


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("rpc", [False, True])
def test_latencies_during_a_stall_count_from_scheduled_times(tmp_path: Path, rpc: bool) -> None:
    """The server stalls from 0.4 to 1.9 s of a run with 20 requests per second for 2.2 s.

    TTFT is 20 ms and ITL is 10 ms. Answers in progress at 0.4 s continue at 1.9 s. Lower bounds are
    narrow, because a closed-loop generator would report latencies that are too low by up to 1.5 s.
    Upper bounds are wide, because the machine may be busy.
    """
    behaviour = Behaviour(ttft_s=0.02, itl_s=0.01, stall_s=(0.4, 1.9))
    with serving(behaviour) as server:
        code, output = run(
            server, tmp_path, *LENGTHS, "--arrivals", "constant", "--rate", "20",
            "--duration", "2.2", rpc=rpc,
        )  # fmt: skip
    assert code == 0, output
    records, summary = read_run(tmp_path)
    assert summary["outcomes"]["succeeded"] == len(records) == 44
    assert records[0].first is not None
    stalled = records[0].first + 0.4  # the server's clock starts with its first request
    for record in records:
        assert record.first is not None
        assert record.last is not None
        assert record.first >= record.due
        if stalled < record.due < 1.7:
            assert record.first >= 1.9
    # Requests due during the stall wait for its end. Each first token is followed by seven gaps.
    ttft = [0.02] * 14 + [1.9 + 0.02 - 0.05 * n for n in range(8, 38)]
    measures = summary["measures"]
    for name, more in (("ttft", 0.0), ("e2e", 0.07)):
        expected = Distribution.of([one + more for one in ttft])
        assert expected is not None
        assert -0.3 < measures[name]["mean"] - expected.mean < BUSY_S
        assert -0.3 < measures[name]["max"] - expected.maximum < BUSY_S
        for which in (50, 90, 99):
            found = measures[name][f"p{which}"]
            assert -0.3 < found - expected.percentile(which) < BUSY_S
    for name in ("tpot", "itl"):
        assert 0 < measures[name]["p50"] < BUSY_S
    per_token = measures["normalized_latency"]["p50"]
    assert per_token == pytest.approx(measures["e2e"]["p50"] / 8, rel=1e-9)


@pytest.mark.slow
def test_outcomes_are_counted_and_requirements_are_checked(tmp_path: Path) -> None:
    outcomes = (Outcome.OK, Outcome.STATUS_429, Outcome.OK, Outcome.HALF_CLOSE)
    with serving(Behaviour(ttft_s=0.01, outcomes=outcomes)) as server:
        code, output = run(
            server, tmp_path, *LENGTHS, "--rate", "40", "--requests", "40",
            "--objective", "ttft=5", "--require", "failures<=0.6", "--require", "attainment>=0.9",
        )  # fmt: skip
    assert code == 1, output
    assert "requirement not met: attainment>=0.9 (at least 90.0 %), measured 50.0 %" in output
    assert "failures<=0.6" not in output
    summary = summary_of(tmp_path)
    assert summary["outcomes"]["failed"] == {"rejected": 10, "interrupted": 10}
    assert summary["outcomes"]["succeeded"] == summary["measures"]["e2e"]["count"] == 20
    assert summary["goodput"]["attainment"] == 0.5
    assert summary["requirements"]["attainment>=0.9"] == {"found": 0.5, "met": False}
    assert summary["throughput"]["offered"] == pytest.approx(40, rel=0.6)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("loop", [("--rate", "20"), ("--concurrency", "8")])
def test_clients_hang_up_at_the_end_of_the_duration(tmp_path: Path, loop: tuple[str, str]) -> None:
    with serving(Behaviour(ttft_s=0.01, itl_s=30.0)) as server:
        code, output = run(server, tmp_path, *LENGTHS, *loop, "--duration", "2", "--hang-up")
        ends = time.monotonic() + 30
        while any(truth.left is None for truth in server.log()):
            assert time.monotonic() < ends, "the server does not notice that a client has left"
            time.sleep(0.05)
        truths = server.log()
    assert code == 0, output
    summary = summary_of(tmp_path)
    assert not summary["stopped"]
    assert summary["outcomes"]["unfinished"] == len(truths) > 0
    assert summary["window"]["end"] == pytest.approx(2)


@pytest.mark.slow
def test_prompts_and_outputs_have_the_requested_lengths(tmp_path: Path) -> None:
    with serving(Behaviour()) as server:
        code, output = run(
            server, tmp_path, "--input", "uniform:3,40", "--output", "uniform:2,9",
            "--rate", "100", "--requests", "60", "--seed", "4",
        )  # fmt: skip
        truths = server.log()
    assert code == 0, output
    records, summary = read_run(tmp_path)
    tokens = sum(truth.prompt_tokens for truth in truths)
    assert summary["lengths"]["input"] == {"asked": tokens, "counted": tokens}
    assert len(set(summary["lengths"]["output"].values())) == 1
    assert sorted(t.prompt_tokens for t in truths) == sorted(r.input_tokens for r in records)
    assert len({record.input_tokens for record in records}) > 15
    for record in records:
        assert record.output_tokens == record.wanted_tokens == len(record.times)
    lines = (tmp_path / "requests.csv").read_text().splitlines()
    assert len(lines) == 61
    assert lines[0].startswith("number,due,outcome,input_tokens,output_tokens,ttft,itl")


@pytest.mark.slow
def test_interrupted_run_writes_a_report(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=0.05, itl_s=0.2)) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "loadgen", "run", server.url + "/v1", *LENGTHS, *ANY_LAG,
             "--rate", "20", "--duration", "60", "--out", str(tmp_path)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while (
            sum(truth.ended is not None for truth in server.log()) < 20
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    records, summary = read_run(tmp_path)
    # The window ends with the run, and not after the 60 s that were planned.
    ran_s = summary["window"]["end"]
    assert max(record.sent for record in records if record.sent is not None) < ran_s < 59
    assert summary["throughput"]["offered"] == pytest.approx(20, rel=0.6)
    due = sum(record.due < ran_s for record in records)
    assert summary["outcomes"]["total"] == due < len(records)
    assert summary["stopped"] is True
    assert summary["outcomes"]["succeeded"] > 2
    assert summary["outcomes"]["unfinished"] > 0
    assert summary["outcomes"]["failed"] == {}


@pytest.mark.slow
def test_saturation_is_found_if_the_requests_run_out_before_the_duration(tmp_path: Path) -> None:
    """Forty requests per second are sent for half a second to a server that completes ten."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(20 * orjson.dumps({"prompt": "w1 w2", "max_tokens": 1}, None, NEW_LINE))
    flags = ("--arrivals", "constant", "--rate", "40", "--duration", "60")
    with serving(Behaviour(ttft_s=0.1, concurrency=1)) as server:
        for source in ((*LENGTHS[:3], "fixed:1", "--requests", "20"), ("--file", file)):
            code, output = run(server, tmp_path, *flags, *source)
            assert code == 0, output
            assert "requests in flight grew by" in output
            summary = summary_of(tmp_path)
            assert summary["window"] == {"begin": 0.0, "end": 0.5}
            assert summary["throughput"]["offered"] == 40
            assert summary["outcomes"]["succeeded"] == 20


@pytest.mark.slow
@pytest.mark.parametrize("limit", [("--requests", "1"), ("--duration", "60")])
def test_single_request_of_a_trace_is_measured_until_its_end(
    tmp_path: Path, limit: tuple[str, str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(orjson.dumps({"prompt": "w1 w2", "max_tokens": 3, "timestamp": 7}))
    with serving(Behaviour(ttft_s=0.2)) as server:
        code, output = run(server, tmp_path, "--file", file, "--arrivals", "trace", *limit)
    assert code == 0, output
    (record,), summary = read_run(tmp_path)
    assert record.ended is not None
    assert summary["window"]["end"] == pytest.approx(record.ended, abs=1.0)
    assert 0 < summary["throughput"]["offered"] <= 1 / record.ended
    assert summary["throughput"]["requests"] == summary["throughput"]["offered"]


@pytest.mark.slow
def test_warm_up_and_cool_down_are_not_measured(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=0.01)) as server:
        flags = ("--arrivals", "constant", "--rate", "20", "--duration", "2")
        code, output = run(
            server, tmp_path, *LENGTHS, *flags, "--warm-up", "0.5", "--cool-down", "0.5"
        )
        assert code == 0, output
        assert summary_of(tmp_path)["outcomes"]["total"] == 20
        code, output = run(server, tmp_path, *LENGTHS, *flags, "--warm-up", "2")
    assert code == 2
    assert "leave nothing of the run to measure" in output


@pytest.mark.slow
def test_run_with_a_late_load_generator_is_invalid(tmp_path: Path) -> None:
    with serving(Behaviour()) as server:
        code, output = run(
            server, tmp_path, *LENGTHS, "--rate", "50", "--requests", "20", "--most-lag", "1e-9"
        )
    assert code == 3
    assert "the load generator was late" in output
    assert summary_of(tmp_path)["invalid"].startswith("the load generator was late")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--rate", "5", "--requests", "2"), "no workload"),
        ((*LENGTHS, "--requests", "2"), "need --rate"),
        ((*LENGTHS, "--rate", "5"), "a number of requests or a duration"),
        (
            (*LENGTHS, "--rate", "5", "--duration", "0"),
            "--duration must be finite and above 0, not 0",
        ),
        ((*LENGTHS, "--rate", "5", "--requests", "2", "--seed", "-1"), "'--seed'"),
        ((*LENGTHS, "--rate", "-1", "--requests", "2"), "rate must be above 0, not -1"),
        ((*LENGTHS, "--rate", "5", "--requests", "2", "--extra-body", "[1]"), "not a JSON object"),
        (
            (*LENGTHS, "--rate", "5", "--requests", "2", "--require", "ttft<=1"),
            "expected ttft with one of mean",
        ),
        (
            (*LENGTHS, "--rate", "5", "--requests", "2", "--objective", "tfft=1"),
            "expected one of ttft",
        ),
        (("--file", "nothing.jsonl", "--rate", "5", "--requests", "2"), "nothing.jsonl"),
        ((*LENGTHS, "--arrivals", "trace", "--requests", "2"), "a workload with times"),
    ],
)
def test_unusable_options_are_explained(flags: tuple[str, ...], why: str) -> None:
    with serving(Behaviour()) as server:
        code, output = loadgen("run", server.url + "/v1", *flags)
    assert code == 2
    assert why in output


def test_unreachable_target_is_a_usage_error() -> None:
    with closed_port() as url:
        code, output = loadgen("run", url + "/v1", *LENGTHS, "--rate", "1", "--requests", "1")
    assert code == 2
    assert f"headrace-loadgen: cannot reach {url}/v1" in output
