"""Whole runs, by the command, against servers whose latencies are known."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from loadgen.cli import app
from loadgen.errors import UsageError
from loadgen.files import read_run
from loadgen.statistics import Distribution
from tests.loadgen.synthetic import Behaviour, Outcome, SyntheticServer, closed_port, serving

COMMAND = [sys.executable, "-m", "loadgen"]
ANY_LAG = ("--most-lag", "60")  # the machine may be busy


def run(server: SyntheticServer, folder: Path, *flags: str, rpc: bool = False) -> tuple[int, str]:
    target = f"grpc://{server.grpc_target}" if rpc else server.url + "/v1"
    own = ("--tokenizer-url", server.url) if rpc else ()
    done = subprocess.run(
        [*COMMAND, "run", target, *own, *ANY_LAG, *flags, "--out", str(folder)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(orjson.loads((folder / "summary.json").read_bytes()))


LENGTHS = ("--input", "fixed:5", "--output", "fixed:8")


@pytest.mark.parametrize("rpc", [False, True])
def test_a_server_that_stops_is_seen_from_the_scheduled_times(tmp_path: Path, rpc: bool) -> None:
    """20 requests a second for 4.4 s, of which the server reads none from 0.6 to 3.6 s. Each token
    takes 10 ms, the first 20 ms; those that were being written at 0.6 s go on at 3.6 s."""
    behaviour = Behaviour(ttft_s=0.02, itl_s=0.01, stall_s=(0.6, 3.6))
    with serving(behaviour) as server:
        code, said = run(
            server, tmp_path, *LENGTHS, "--arrivals", "constant", "--rate", "20",
            "--duration", "4.4", rpc=rpc,
        )  # fmt: skip
    assert code == 0, said
    records, summary = read_run(tmp_path)
    assert summary["outcomes"]["succeeded"] == len(records) == 88
    for record in records:
        assert record.first is not None
        assert record.last is not None
        begins = 3.6 if 0.6 <= record.due < 3.6 else record.due
        assert record.first == pytest.approx(begins + 0.02, abs=0.04)
        stalled = 0.5 < record.due < 0.65  # the server's clock starts with its first request
        assert record.last - record.first == pytest.approx(0.07, abs=0.04) or stalled
    # A request of each 50 ms of the stall waits for what is left of it; 7 gaps follow the first.
    # When it ends 60 are answered at a time, which takes both sides a while.
    ttft = [0.02] * 28 + [3.6 + 0.02 - 0.05 * n for n in range(12, 72)]
    measures = summary["measures"]
    for name, more in (("ttft", 0.0), ("e2e", 0.07)):
        expected = Distribution.of([one + more for one in ttft])
        assert expected is not None
        assert measures[name]["mean"] == pytest.approx(expected.mean, abs=0.1)
        assert measures[name]["max"] == pytest.approx(expected.most, abs=0.15)
        for which in (50, 90, 99):
            found = measures[name][f"p{which}"]
            assert found == pytest.approx(expected.percentile(which), abs=0.15)
    for name in ("tpot", "itl"):
        assert measures[name]["p50"] == pytest.approx(0.01, abs=0.003)
    in_eights = measures["normalized_latency"]["p50"]
    assert in_eights == pytest.approx(measures["e2e"]["p50"] / 8, rel=1e-9)


def test_every_outcome_is_counted_and_requirements_are_judged(tmp_path: Path) -> None:
    outcomes = (Outcome.OK, Outcome.STATUS_429, Outcome.OK, Outcome.HALF_CLOSE)
    with serving(Behaviour(ttft_s=0.01, outcomes=outcomes)) as server:
        code, said = run(
            server, tmp_path, *LENGTHS, "--rate", "40", "--requests", "40",
            "--objective", "ttft=5", "--require", "failures<=0.6", "--require", "attainment>=0.9",
        )  # fmt: skip
    assert code == 1, said
    assert "not met: attainment>=0.9, found 0.5" in said
    assert "failures<=0.6" not in said
    summary = summary_of(tmp_path)
    assert summary["outcomes"]["failed"] == {"rejected": 10, "interrupted": 10}
    assert summary["outcomes"]["succeeded"] == summary["measures"]["e2e"]["count"] == 20
    assert summary["goodput"]["attainment"] == 0.5
    assert summary["requirements"]["attainment>=0.9"] == {"found": 0.5, "met": False}
    assert summary["throughput"]["offered"] == pytest.approx(40, rel=0.6)


def test_prompts_and_answers_have_the_lengths_that_were_asked_for(tmp_path: Path) -> None:
    with serving(Behaviour()) as server:
        code, said = run(
            server, tmp_path, "--input", "uniform:3,40", "--output", "uniform:2,9",
            "--rate", "100", "--requests", "60", "--seed", "4",
        )  # fmt: skip
        truths = server.log()
    assert code == 0, said
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


def test_what_is_stopped_ends_with_a_report(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=0.05, itl_s=0.2)) as server:
        process = subprocess.Popen(
            [*COMMAND, "run", server.url + "/v1", *LENGTHS, "--rate", "20", "--duration", "60",
             *ANY_LAG, "--out", str(tmp_path)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while not server.log() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(2.0)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=20)
    assert process.returncode == 130, said
    summary = summary_of(tmp_path)
    assert summary["stopped"] is True
    assert summary["outcomes"]["succeeded"] > 2
    assert summary["outcomes"]["unfinished"] > 0
    assert summary["outcomes"]["failed"] == {}


def test_warm_up_and_cool_down_do_not_count(tmp_path: Path) -> None:
    with serving(Behaviour(ttft_s=0.01)) as server:
        flags = ("--arrivals", "constant", "--rate", "20", "--duration", "2")
        code, said = run(
            server, tmp_path, *LENGTHS, *flags, "--warm-up", "0.5", "--cool-down", "0.5"
        )
        assert code == 0, said
        assert summary_of(tmp_path)["outcomes"]["total"] == 20
        code, said = run(server, tmp_path, *LENGTHS, *flags, "--warm-up", "2")
    assert code == 2
    assert "nothing is left of the run" in said


def test_a_generator_that_is_late_says_that_its_run_does_not_count(tmp_path: Path) -> None:
    with serving(Behaviour()) as server:
        code, said = run(
            server, tmp_path, *LENGTHS, "--rate", "50", "--requests", "20", "--most-lag", "1e-9"
        )
    assert code == 3
    assert "the generator was late" in " ".join(said.split())
    assert summary_of(tmp_path)["invalid"].startswith("the generator was late")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--rate", "5", "--requests", "2"), "what is to be asked?"),
        ((*LENGTHS, "--requests", "2"), "need --rate"),
        ((*LENGTHS, "--rate", "5"), "a number of requests or a duration"),
        ((*LENGTHS, "--rate", "-1", "--requests", "2"), "rate is -1"),
        ((*LENGTHS, "--rate", "5", "--requests", "2", "--extra-body", "[1]"), "no JSON object"),
        ((*LENGTHS, "--rate", "5", "--requests", "2", "--require", "ttft<=1"), "ttft has mean"),
        ((*LENGTHS, "--rate", "5", "--requests", "2", "--objective", "tfft=1"), "measures are"),
        (("--file", "nothing.jsonl", "--rate", "5", "--requests", "2"), "nothing.jsonl"),
        ((*LENGTHS, "--arrivals", "trace", "--requests", "2"), "a workload with times"),
    ],
)
def test_what_cannot_be_run_says_why(flags: tuple[str, ...], why: str) -> None:
    with serving(Behaviour()) as server:
        result = CliRunner().invoke(app, ["run", server.url + "/v1", *flags])
    assert isinstance(result.exception, UsageError)
    assert why in str(result.exception)


def test_a_target_that_is_not_there_is_a_usage_error() -> None:
    with closed_port() as url:
        done = subprocess.run(
            [*COMMAND, "run", url + "/v1", *LENGTHS, "--rate", "1", "--requests", "1"],
            capture_output=True, text=True, timeout=60, env=os.environ,
        )  # fmt: skip
    assert done.returncode == 2
    assert "lists no model" in done.stderr
